"""What the tests of exports share: compressed tiny models and tiny tokenizers."""

from functools import cache
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from tiny_models import LLAMA, tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.pipeline import compress

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole-qk": {"method": "a3", "parts": ("ov", "mlp")},
    "model-rates": {"method": "a3+", "rope_scope": "model"},
    "per-head": {"method": "a3+"},
    "some-layers": {"method": "a3", "layers": (1,)},
    "qk-alone": {"method": "a3", "parts": ("qk",)},
    "wide-values": {"method": "a3+", "rope_scope": "model", "parts": ("qk", "mlp")},
    "factored": {"method": "svd-llm"},
}


@cache
def compressed(name: str, setting: str) -> Any:
    """A compressed tiny model; nobody may change it."""
    if name == "llama-yarn":
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**LLAMA, rope_parameters=dict(YARN))
        model = transformers.LlamaForCausalLM(config).eval()
    else:
        model = tiny(name)
    config = CompressConfig(**{"ratio": 0.3, "align": None, **SETTINGS[setting]})
    return compress(model, config, tokens=tokens_from_tensor(tokens(4, 40))).model


def pieces(*, vocabulary: str = "ehlowrdt") -> Any:
    """A tokenizer as SentencePiece makes them: a space in front, bytes for what is unknown."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(16)), "\u2581", *vocabulary]
    merges = [
        ("h", "e"),
        ("l", "o"),
        ("\u2581", "he"),
        ("l", "lo"),
        ("\u2581he", "llo"),
        ("o", "r"),
        ("w", "or"),
    ]
    backend = _bpe(words, merges, byte_fallback=True)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _fast(backend)


def bytewise(*splits: Any, vocabulary: str = "ehlowrdt") -> Any:
    """A tokenizer as GPT-2 makes them."""
    merges = [("h", "e"), ("l", "o"), ("\u0120", "he"), ("l", "lo"), ("o", "r"), ("w", "or")]
    backend = _bpe(["<unk>", "<s>", "</s>", "\u0120", *vocabulary], merges)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return _fast(backend)


def _bpe(words: list[str], merges: list[tuple[str, str]], **settings: Any) -> Any:
    words = [*words, *("".join(merge) for merge in merges)]
    model = tokenizers.models.BPE(
        {word: i for i, word in enumerate(words)}, merges, unk_token="<unk>", **settings
    )
    return tokenizers.Tokenizer(model)


def _fast(backend: Any) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
