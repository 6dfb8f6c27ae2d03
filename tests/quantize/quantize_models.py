"""What the tests of quantisation share: tiny models, and one in a folder with a tokenizer."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tiny_models import LLAMA, shake, tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.models.linear import QuantizedLinear
from trisect.pipeline.run import compress

TEXT = "the quick brown fox jumps over the lazy dog and the lazy dog sleeps on. "


@cache
def need_hqq() -> None:
    pytest.importorskip("hqq.core.quantize", reason="the extra trisect[quantize] is not installed")


def narrow(name: str, **settings: Any) -> Any:
    """A compressed tiny model of its own."""
    given = {"ratio": 0.4, "align": None, "method": "a3", **settings}
    if "kv_ratio" in given:
        del given["ratio"]
    return compress(tiny(name), CompressConfig(**given), tokens=tokens_from_tensor(tokens(4, 40))).model


def dequantised(model: Any) -> Any:
    """A copy with plain linear layers that hold what the quantised ones stand for."""
    model = copy.deepcopy(model)
    for path, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            plain.weight = nn.Parameter(module.dequantized())
            if module.bias is not None:
                plain.bias = nn.Parameter(module.bias)
            model.set_submodule(path, plain)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(tokens()).logits


def save_with_tokenizer(folder: Path) -> Path:
    """A dense model in a folder, whose tokenizer knows the letters of TEXT."""
    letters = sorted(set(TEXT) - {" "})
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "\u2581", *letters])}
    backend = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_characters(vocabulary), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, "head_dim": 32})).eval()
    shake(model, seed=0)
    model.save_pretrained(folder)
    backend.save_pretrained(folder)
    return folder


def _characters(vocabulary: dict[str, int]) -> Any:
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    return backend
