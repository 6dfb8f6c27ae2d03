"""Quantisation under KV-cache compression on stories-mpt-20m (in the paper: MPT-30B), a receipt per row.

    .venv/bin/python experiments/quantise_stories_mpt.py    # every row that has no receipt yet
    .venv/bin/python experiments/quantise_tables.py         # the table of docs/quantize.md

HQQ holds the attention's weights and the KV cache in the same number of bits; the MLP stays whole. All tokens
are read back from the quantised cache, the newest too (residual_length=0). Head widths are multiples of 8, so
that a group fills bytes: the share that was really removed is in the receipt. One half of TinyStories
calibrates, 128 windows of 256 tokens, and 64 of the other half evaluate, in float32. Bytes are counted while
the model generates in bfloat16.
"""

import copy
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from core_protocol import ASSETS, HALVES, ROOT, split_stories
from tables import keep_row, known
from torch import nn
from transformers import DynamicCache

from trisect.config import CompressConfig
from trisect.data import load_tokens
from trisect.evaluate.perplexity import perplexity
from trisect.models import load_model, original_shape, shape_of
from trisect.pipeline.run import compress
from trisect.plan import budget_of
from trisect.quantize import QuantizeConfig, cache_bytes, count_bits, quantize_model, quantized_cache
from trisect.support.receipt import build_receipt

FILE = "quantise-stories-mpt.json"
MODEL = ASSETS / "models/stories-mpt-20m"
PROMPT, NEW = 32, 400
REFERENCE = 2
"""Bytes per number of the dense model that factors are relative to: 16 bits, as in the paper."""

# Method, share of the attention's weights to remove, bits; None leaves out.
ROWS: dict[str, tuple[str | None, float | None, int | None]] = {
    "dense": (None, None, None),
    "hqq8": (None, None, 8),
    "hqq4": (None, None, 4),
    "hqq2": (None, None, 2),
    **{f"{m}-{r:g}-hqq4": (m, r, 4) for m in ("a3", "a3+") for r in (0.2, 0.4, 0.6)},
}


class ThroughCache(nn.Module):
    """A model that reads every key and value back from a quantised cache."""

    def __init__(self, model: Any, bits: int):
        super().__init__()
        self.model, self.bits, self.config = model, bits, model.config

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        cache = quantized_cache(self.model, bits=self.bits, residual_length=0)
        return self.model(input_ids=input_ids, past_key_values=cache, use_cache=True)


def main() -> None:
    """Run the rows that are missing."""
    os.chdir(ROOT)
    split_stories()
    for name, (method, ratio, bits) in ROWS.items():
        if name not in known(FILE):
            print(name, flush=True)
            keep_row(FILE, {"name": name, **row(method, ratio, bits)})


def row(method: str | None, ratio: float | None, bits: int | None) -> dict[str, Any]:
    """Compress, quantise, measure."""
    start = time.perf_counter()
    loaded = load_model(str(MODEL), dtype="float32")
    model, tokenizer = loaded.model, loaded.tokenizer
    recipe: dict[str, Any] = {"model": str(MODEL), "bits": bits, "residual_length": 0}
    if method is not None:
        assert ratio is not None
        config = CompressConfig(method=method, ratio=ratio, parts=("qk", "ov"), align=8)
        recipe["compress"] = config.to_dict()
        model = compress(model, config, tokens=windows(HALVES[0], tokenizer, 128)).model
    if bits is not None:
        settings = QuantizeConfig(bits=bits, parts=("qk", "ov"))
        recipe["quantize"] = asdict(settings)
        quantize_model(model, settings)
    tokens = windows(HALVES[1], tokenizer, 64)
    measured = perplexity(model if bits is None else ThroughCache(model, bits), tokens, batch_size=8)
    timings = {"all": time.perf_counter() - start}
    return {
        "method": method,
        "ratio": ratio,
        "bits": bits,
        "perplexity": asdict(measured),
        "attention": attention(model),
        "cache": live_cache(model, bits, tokens.ids[:1, :PROMPT]),
        "receipt": build_receipt(recipe, seed=0, token_hash=tokens.hash, timings=timings),
    }


def windows(path: Path, tokenizer: Any, samples: int) -> Any:
    """The first windows of 256 tokens of a text."""
    return load_tokens(str(path), tokenizer, samples=samples, length=256, sampling="first", seed=0, split="evaluation")


def attention(model: Any) -> dict[str, Any]:
    """Bytes and weights of the attention's matrices, and how many times smaller they are than in 16 bits."""
    now, before = budget_of(shape_of(model)).components, budget_of(original_shape(model)).components
    rest = now["mlp"] * 4  # the MLP stays in float32
    size = count_bits(model).decoder_bytes - rest
    weights, original = now["qk"] + now["ov"], before["qk"] + before["ov"]
    if shape_of(model).bytes_per_element == 4 and size == 4 * weights:
        size = REFERENCE * weights  # what is not quantised is compared in 16 bits too
    return {
        "bytes": size,
        "weights": weights,
        "original_weights": original,
        "removed": 1 - weights / original,
        "factor": REFERENCE * original / size,
    }


@torch.no_grad()
def live_cache(model: Any, bits: int | None, prompt: torch.Tensor) -> dict[str, Any]:
    """Bytes of a cache after a long generation in bfloat16, and how many times fewer than the dense ones."""
    model = copy.deepcopy(model).to(torch.bfloat16)
    cache = DynamicCache() if bits is None else quantized_cache(model, bits=bits, residual_length=0)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, use_cache=True, **options)
    tokens, size = cache.get_seq_length(), cache_bytes(cache)
    planned = budget_of(shape_of(model)).kv_bytes_per_token
    dense = budget_of(original_shape(model)).kv_bytes_per_token
    return {
        "tokens": tokens,
        "bytes": size,
        "bytes_per_token": size / tokens,
        "planned_bytes_per_token": planned if bits is None else None,
        "factor": dense * tokens / size,
    }


if __name__ == "__main__":
    main()
