"""Fused or separate projections as heads: the one place that knows in which order q, k and v are stored.

h = query heads, k = key/value heads
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

QKV = ("q", "k", "v")


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """Sizes of a layer's heads and how its projections hold them."""

    heads: int
    kv_heads: int
    qk: int
    vo: int
    per_head: bool
    """One projection with [q | k | v] head by head."""

    def split(self, columns: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(..., out) of one or three projections -> (..., h, qk), (..., k, qk), (..., k, vo)."""
        if self.per_head:
            q, k, v = columns[0].unflatten(-1, (self.heads, -1)).split([self.qk, self.qk, self.vo], dim=-1)
            return q, k, v
        if len(columns) == 1:
            sizes = [self.heads * self.qk, self.kv_heads * self.qk, self.kv_heads * self.vo]
            columns = columns[0].split(sizes, dim=-1)
        q, k, v = columns
        return (
            q.unflatten(-1, (self.heads, self.qk)),
            k.unflatten(-1, (self.kv_heads, self.qk)),
            v.unflatten(-1, (self.kv_heads, self.vo)),
        )

    def join(self, q: Tensor, k: Tensor, v: Tensor, *, fused: bool) -> list[Tensor]:
        """Undo `split`."""
        if self.per_head:
            return [torch.cat([q, k, v], dim=-1).flatten(-2)]
        columns = [x.flatten(-2) for x in (q, k, v)]
        return [torch.cat(columns, dim=-1)] if fused else columns

    def fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(..., out) of three maps, each with its heads side by side -> (..., out) of one projection."""
        counts = (self.heads, self.kv_heads, self.kv_heads)
        heads = [x.unflatten(-1, (n, -1)) for x, n in zip((q, k, v), counts, strict=True)]
        return self.join(*heads, fused=True)[0]
