"""A KV cache in fewer bits, on top of narrow heads; and what a cache really weighs."""

from typing import Any

import torch
from torch import Tensor

from trisect.errors import TrisectError
from trisect.models.quantized import BITS
from trisect.quantize.backends import require

LARGEST_GROUP = 64


def quantized_cache(
    model: Any, *, bits: int = 4, group_size: int | None = None, residual_length: int = 128
) -> Any:
    """An empty cache for `model.generate(..., past_key_values=cache)`, quantised by HQQ.

    Channels of one head of one token share a scale: `group_size` of them, or by default the most that divide
    the head's width, 64 at most. The last tokens, up to `residual_length`, are held as they are.
    """
    from transformers import Cache

    from trisect.quantize.packed_layer import PackedLayer

    if bits not in BITS:
        raise TrisectError(f"Cannot hold a KV cache in {bits} bits; use one of {', '.join(map(str, BITS))}.")
    if residual_length < 0:
        raise TrisectError(f"residual_length must be 0 or more, got {residual_length}.")
    require("hqq")
    layers = []
    for index, (keys, values) in enumerate(_cached_widths(model)):
        sizes = _fitting(index, keys, group_size), _fitting(index, values, group_size)
        layers.append(PackedLayer(bits=bits, group_sizes=sizes, residual_length=residual_length))
    return Cache(layers=layers)


def cache_bytes(cache: Any) -> int:
    """Bytes of the tensors that a cache holds at this moment, scales and offsets included."""
    return sum(_bytes(value) for layer in cache.layers for value in vars(layer).values())


@torch.no_grad()
def _cached_widths(model: Any) -> list[tuple[int, int]]:
    """Per layer: the width of what it caches as a key and as a value, seen on one token."""
    from transformers import DynamicCache

    cache = DynamicCache()
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=token, past_key_values=cache, use_cache=True)
    return [(layer.keys.shape[-1], layer.values.shape[-1]) for layer in cache.layers]


def _fitting(index: int, width: int, asked: int | None) -> int:
    sizes = [size for size in range(LARGEST_GROUP, 0, -8) if width % size == 0]
    if not sizes:
        raise TrisectError(
            f"Layer {index} caches heads of width {width}, which is no multiple of 8; compress with "
            "--align 8 or 16 for a quantised cache."
        )
    if asked is not None and asked not in sizes:
        raise TrisectError(
            f"Groups of {asked} do not divide the cached heads of layer {index}, {width} wide; "
            f"use {', '.join(map(str, sizes))}, or leave group_size out."
        )
    return sizes[0] if asked is None else asked


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, tuple | list) else 0
