"""A KV cache in fewer bits, on top of narrow heads; and the bytes that a cache really takes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from trisect.errors import TrisectError
from trisect.models.linear import BITS, pack, unpack
from trisect.quantize.weights import hqq_levels, require

# b = batch, k = key/value heads, t = tokens, d = width

LARGEST_GROUP = 64


class PackedLayer(DynamicLayer):
    """Recent tokens in full precision (`keys`, `values`), older ones packed (`packed`)."""

    is_croppable = False

    def __init__(self, *, bits: int, group_sizes: tuple[int, int], residual_length: int):
        super().__init__()
        self.bits, self.group_sizes, self.residual_length = bits, group_sizes, residual_length
        self.packed: list[list[Tensor]] = [[], []]
        """For keys and for values: bytes, scales and offsets, (b, k, t, ...) each; empty at first."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = _no_tokens(key_states), _no_tokens(value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add new tokens and return all; new ones are returned unrounded unless `residual_length` is 0."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        if self.residual_length == 0:
            self._pack_recent()
        keys, values = (
            torch.cat([self._unpacked(side, recent.dtype), recent], dim=-2) if side else recent
            for side, recent in zip(self.packed, (self.keys, self.values), strict=True)
        )
        if self.keys.shape[-2] > self.residual_length:
            self._pack_recent()
        return keys, values

    def get_seq_length(self) -> int:
        packed = self.packed[0][0].shape[-2] if self.packed[0] else 0
        return packed + int(self.keys.shape[-2]) if self.is_initialized else 0

    def reset(self) -> None:
        self.packed = [[], []]
        self.is_initialized = False  # the next update begins with empty tensors

    def crop(self, tokens_to_remove: int) -> None:
        raise TrisectError("A quantised KV cache cannot be cropped; use the model's default cache here.")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_batch(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change_batch(lambda x: x[indices.to(x.device)])

    reorder_cache = batch_select_indices

    def _change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
            self.packed = [[change(x) for x in side] for side in self.packed]

    def _pack_recent(self) -> None:
        for number, recent in enumerate((self.keys, self.values)):
            new, old = self._quantized(recent, self.group_sizes[number]), self.packed[number]
            self.packed[number] = [torch.cat(x, dim=-2) for x in zip(old, new, strict=True)] if old else new
        self.keys, self.values = _no_tokens(self.keys), _no_tokens(self.values)

    def _quantized(self, x: Tensor, group_size: int) -> list[Tensor]:
        levels, _ = hqq_levels(x.flatten(0, 2), bits=self.bits, group_size=group_size)  # (b k t, d)
        assert levels.zero is not None
        # An offset is of the size of the numbers themselves; a zero point may be too large for 16 bits.
        offset = -levels.zero * levels.scale
        tensors = pack(levels.values, self.bits), levels.scale.half(), offset.half()
        return [tensor.unflatten(0, x.shape[:3]) for tensor in tensors]

    def _unpacked(self, side: list[Tensor], dtype: torch.dtype) -> Tensor:
        packed, scale, offset = side
        values = unpack(packed.flatten(0, 2), self.bits).float()  # (b k t, d)
        groups = values.unflatten(0, packed.shape[:3]).unflatten(-1, (scale.shape[-1], -1))
        return (groups * scale.float().unsqueeze(-1) + offset.float().unsqueeze(-1)).flatten(-2).to(dtype)


def _no_tokens(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:2], 0, x.shape[3]))


def quantized_cache(model: Any, *, bits: int = 4, group_size: int | None = None, residual_length: int = 128) -> Cache:
    """An empty cache for `model.generate(..., past_key_values=cache)`, quantised by HQQ.

    Channels of one head of one token share a scale: `group_size` of them, or by default the most that divide
    the head's width, 64 at most. The last tokens, up to `residual_length`, are held as they are.
    """
    if bits not in BITS:
        raise TrisectError(f"Cannot hold a KV cache in {bits} bits; use one of {', '.join(map(str, BITS))}.")
    if residual_length < 0:
        raise TrisectError(f"residual_length must be 0 or more, got {residual_length}.")
    require("hqq")
    seen = DynamicCache()  # of one token, for the widths that each layer caches
    with torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        model(input_ids=token, past_key_values=seen, use_cache=True)
    layers = []
    for index, layer in enumerate(seen.layers):
        keys, values = (_fitting(index, x.shape[-1], group_size) for x in (layer.keys, layer.values))
        layers.append(PackedLayer(bits=bits, group_sizes=(keys, values), residual_length=residual_length))
    return Cache(layers=layers)


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
    return asked or sizes[0]


def cache_bytes(cache: Any) -> int:
    """Bytes of the tensors that a cache holds at this moment, scales and offsets included."""
    return sum(_bytes(value) for layer in cache.layers for value in vars(layer).values())


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes, value)) if isinstance(value, tuple | list) else 0
