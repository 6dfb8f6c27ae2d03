"""Fused or separate projections as heads: the one place that knows in which order q, k and v are stored.

h = query heads, k = key/value heads
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True)
class FusedMaps:
    """Several linear maps of one input as one matrix, of which the modules' own weights are rows."""

    modules: tuple[nn.Linear, ...]
    weights: tuple[Tensor, ...]
    weight: Tensor
    bias: Tensor | None

    @property
    def sizes(self) -> list[int]:
        return [weight.shape[0] for weight in self.weights]

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def applies(self, modules: Sequence[nn.Module]) -> bool:
        """Whether calling this is the same as calling the modules: gradients need those."""
        return not torch.is_grad_enabled() and self.holds(modules)

    def holds(self, modules: Sequence[nn.Module]) -> bool:
        """Whether these are still the modules, and their weights still rows of the matrix."""
        if torch.compiler.is_compiling():
            # Nothing replaces modules inside, and asking who they are would compile every layer anew.
            return True
        for now, then, row in zip(modules, self.modules, self.weights, strict=True):
            if now is not then or then.weight is not row:
                return False
        return self.weights[0].data_ptr() == self.weight.data_ptr()


def fused_maps(modules: Sequence[nn.Module]) -> FusedMaps | None:
    """One matrix for all, which replaces the modules' own memory; None unless all are plain linear layers."""
    linears = tuple(module for module in modules if type(module) is nn.Linear)
    biases = [linear.bias for linear in linears if linear.bias is not None]
    kinds = {(linear.weight.dtype, linear.weight.device) for linear in linears}
    if len(linears) != len(modules) or len(biases) not in (0, len(linears)) or len(kinds) != 1:
        return None
    if next(iter(kinds))[1].type == "meta":
        return None
    sizes = [linear.out_features for linear in linears]
    weight = torch.cat([linear.weight.detach() for linear in linears])
    for linear, rows in zip(linears, weight.split(sizes), strict=True):
        linear.weight = nn.Parameter(rows, requires_grad=linear.weight.requires_grad)
    bias = torch.cat([bias.detach() for bias in biases]) if biases else None
    if bias is not None:
        for linear, rows in zip(linears, bias.split(sizes), strict=True):
            linear.bias = nn.Parameter(rows, requires_grad=linear.bias.requires_grad)
    return FusedMaps(linears, tuple(linear.weight for linear in linears), weight, bias)
