"""A random model that reads characters: every prompt works, and nothing has to be downloaded."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# Local documents of tasks, and log-likelihoods without lm-eval.
sys.path.append(str(Path(__file__).resolve().parents[2] / "experiments"))


@pytest.fixture
def random_model() -> Any:
    """A random model that reads characters, with room for the 256 tokens of a written answer."""
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate(["<unk>", "</s>", *characters])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=1,
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    return LlamaForCausalLM(config), fast
