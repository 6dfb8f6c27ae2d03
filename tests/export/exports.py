"""What the tests of exports share: compressed tiny models and tiny tokenizers."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from tiny_models import LLAMA, tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.methods.fold import keep_neurons
from trisect.models import layer_views, mark_compressed, original_widths
from trisect.pipeline.run import compress
from trisect.quantize import QuantizeConfig, quantize_model
from trisect.records.parts import MLP, OV, QK, Experts

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
SETTINGS: dict[str, dict[str, Any]] = {
    "whole-qk": {"method": "a3", "parts": ("ov", "mlp")},
    "model-rates": {"method": "a3+", "rope_scope": "model"},
    "per-head": {"method": "a3+"},
    "some-layers": {"method": "a3", "layers": (1,)},
    "qk-alone": {"method": "a3", "parts": ("qk",)},
    "wide-values": {"method": "a3+", "rope_scope": "model", "parts": ("qk", "mlp")},
    "factored": {"method": "svd-llm"},
    "fewer-experts": {"method": "reap", "parts": ("mlp",)},
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


@cache
def sliced(name: str) -> Any:
    """A tiny model of any family with channels cut off, other ones in every layer; nothing was calibrated."""
    model = tiny(name)
    original = original_widths(model)
    for view in layer_views(model):
        for part in map(view.part, view.components):
            view.write(_cut(part, seed=view.index))
    return mark_compressed(model, original=original, method="none", ratio=0.3)


@cache
def quantized() -> Any:
    """A compressed model with its linear weights in 4 bits."""
    pytest.importorskip("hqq", reason="hqq is not installed (pip install trisect[quantize])")
    config = QuantizeConfig(bits=4, parts=("qk", "mlp"))
    return quantize_model(deepcopy(compressed("llama-gqa", "whole-qk")), config)


def _cut(part: Any, *, seed: int) -> Any:
    """The component with some of its channels: named fields and where their inner channels are."""
    if isinstance(part, Experts):  # grouped products want widths in multiples of 8
        width = part.width // 16 * 8
        shared = part.shared and keep_neurons(part.shared, torch.arange(width * part.shared.width // part.width))
        routed = tuple(keep_neurons(mlp, torch.arange(width) + seed) for mlp in part.routed)
        return replace(part, routed=routed, shared=shared)
    axes = {
        QK: {"W_q": -1, "W_k": -1, "b_q": -1, "b_k": -1, "norm_q": -1, "norm_k": -1},
        OV: {"W_v": -1, "W_o": -2, "b_v": -1, "W_g": -1, "b_g": -1},
        MLP: {"W_up": -1, "W_gate": -1, "W_down": -2, "b_up": -1, "b_gate": -1},
    }[type(part)]
    kept, changes = _kept(part, seed=seed)
    for field, axis in axes.items():
        if getattr(part, field) is not None:
            changes[field] = getattr(part, field).index_select(axis, kept)
    return replace(part, **changes)


def _kept(part: Any, *, seed: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Two thirds of the channels; of queries and keys, whole rotation pairs and all that do not rotate."""
    generator = torch.Generator().manual_seed(seed)
    if not isinstance(part, QK) or not part.num_pairs:
        return torch.randperm(part.width, generator=generator)[: 2 * part.width // 3 + seed], {}
    pairs = torch.randperm(part.num_pairs, generator=generator)[: 2 * part.num_pairs // 3]
    rest = torch.arange(2 * part.num_pairs, part.width)
    kept = torch.cat([pairs, part.num_pairs + pairs, rest])
    return kept, {"frequencies": part.frequencies[:, pairs]}


def continued(server: Any, prompt: Any, count: int) -> list[int]:
    """The tokens that llama.cpp continues tokens or a text with."""
    return [int(step["id"]) for step in server.steps(prompt, count)]


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The tokens that a model continues with, never the end of the text: llama.cpp is asked the same."""
    ids = torch.tensor([prompt])
    never = [model.config.get_text_config().eos_token_id]
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "suppress_tokens": never}
    found = model.generate(ids, max_new_tokens=count, **settings)
    return found[0, len(prompt) :].tolist()


def pieces(*, vocabulary: str = "ehlowrdt") -> Any:
    """A tokenizer as SentencePiece makes them: a space in front, bytes for what is unknown."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(16)), "\u2581", *vocabulary]
    merges = [("h", "e"), ("l", "o"), ("\u2581", "he"), ("l", "lo"), ("\u2581he", "llo"), ("o", "r"), ("w", "or")]
    backend = _bpe(words, merges, byte_fallback=True)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _fast(backend)


WORDS = [("h", "e"), ("l", "o"), ("\u0120", "he"), ("l", "lo"), ("o", "r"), ("w", "or")]


def bytewise(*splits: Any, vocabulary: str = "ehlowrdt", merges: Sequence[tuple[str, str]] = tuple(WORDS)) -> Any:
    """A tokenizer as GPT-2 makes them."""
    backend = _bpe(["<unk>", "<s>", "</s>", "\u0120", *vocabulary], merges)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, words]) if splits else words
    backend.decoder = decoders.ByteLevel()
    return _fast(backend)


def _bpe(words: list[str], merges: Sequence[tuple[str, str]], **settings: Any) -> Any:
    words = [*words, *("".join(merge) for merge in merges)]
    model = tokenizers.models.BPE(
        {word: i for i, word in enumerate(words)}, list(merges), unk_token="<unk>", **settings
    )
    return tokenizers.Tokenizer(model)


def _fast(backend: Any) -> Any:
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
