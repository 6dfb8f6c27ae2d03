"""What the tests of tuning share: tiny compressed models, a tokenizer of characters, a few examples."""

import copy
import string
from functools import cache
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from tiny_models import tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.finetune import Example, Examples, TuneConfig
from trisect.pipeline.run import compress

SMALL = {"rank": 4, "epochs": 1, "batch_size": 2, "accumulate": 2, "length": 16}
OVERFIT = {"epochs": 12, "batch_size": 3, "accumulate": 1, "lr": 2e-2, "rank": 8}


@cache
def _compressed(name: str, method: str) -> Any:
    ids = tokens_from_tensor(tokens(4, 40))
    return compress(tiny(name), CompressConfig(ratio=0.3, align=None, method=method), tokens=ids).model


def compressed(name: str = "llama-gqa", method: str = "a3") -> Any:
    """A tiny compressed model of one's own."""
    return copy.deepcopy(_compressed(name, method))


def examples(count: int = 6, *, seed: int = 5) -> Examples:
    """Random tokens of several lengths, learned from several places on."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 17, (count,), generator=generator).tolist()
    items = tuple(
        Example(tuple(torch.randint(3, 90, (length,), generator=generator).tolist()), 1 + length // 3)
        for length in lengths
    )
    return Examples(items=items, source="random", kind="instructions")


def settings(**changes: Any) -> TuneConfig:
    return TuneConfig(**{**SMALL, **changes})


@cache
def characters(*, start: bool = False) -> Any:
    """One token per printable character; with <s> before every text if `start`."""
    letters = [c for c in string.printable if c.isprintable() and c not in " ~`"]
    words = ["<unk>", "<s>", "</s>", "\n", " ", *letters]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    if start:
        from tokenizers.processors import TemplateProcessing

        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
