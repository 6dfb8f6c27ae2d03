"""A linear map as two: real modules for factored layers.

SplitLinear stands where a checkpoint stores several maps in one matrix and one of them is factored.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trisect.models.heads import HeadLayout
from trisect.parts import Factored

# g = groups, r = rank of a group


class GroupedLinear(nn.Module):
    """A block-diagonal linear map: each group of inputs makes its own group of outputs."""

    bias: nn.Parameter | None

    def __init__(self, groups: int, rank: int, out_features: int, *, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, rank, out_features // groups))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, self.weight.shape[:2])  # (..., g r) -> (..., g, r)
        y = torch.einsum("...gr,gro->...go", groups, self.weight).flatten(-2)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        groups, rank, width = self.weight.shape
        return f"groups={groups}, rank={rank}, out_features={groups * width}, bias={self.bias is not None}"


class FactoredLinear(nn.Module):
    """y = wide(narrow(x)): what is left of a linear map of low rank."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        groups: int = 1,
        bias: bool = False,
        cached: bool = False,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.rank, self.groups = rank, groups
        self.cached = cached
        """The KV cache may hold `latent(x)`; attention decides whether anything stands between."""
        self.narrow = nn.Linear(in_features, groups * rank, bias=False)
        self.wide: nn.Linear | GroupedLinear
        if groups == 1:
            self.wide = nn.Linear(rank, out_features, bias=bias)
        else:
            self.wide = GroupedLinear(groups, rank, out_features, bias=bias)

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self.wide.bias
        return bias

    def latent(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., g r)."""
        return self.narrow(x)

    def expand(self, latent: Tensor) -> Tensor:
        """(..., g r) -> (..., out)."""
        return self.wide(latent)

    def forward(self, x: Tensor) -> Tensor:
        return self.expand(self.latent(x))

    def extra_repr(self) -> str:
        return f"cached={self.cached}"


class SplitLinear(nn.Module):
    """Several maps of one input, one child each, put out in the order of the fused matrix they replace."""

    def __init__(self, maps: Mapping[str, nn.Module], *, layout: HeadLayout | None):
        """`layout` is that of queries, keys and values; None puts the outputs side by side."""
        super().__init__()
        self.layout = layout
        for name, module in maps.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return fused([module(x) for module in self.children()], self.layout)


def fused(columns: Sequence[Tensor], layout: HeadLayout | None) -> Tensor:
    """(..., out) of several maps -> (..., out) of the matrix that holds them all."""
    return torch.cat(list(columns), dim=-1) if layout is None else layout.fused(*columns)


def factored_from(old: Any, solution: Factored) -> FactoredLinear:
    """The module a solution stands for, with the dtype and mode of the module it replaces."""
    groups, rank, width = solution.B.shape
    bias = solution.b
    with torch.device("meta"):
        new = FactoredLinear(
            solution.A.shape[0],
            groups * width,
            rank=rank,
            groups=groups,
            bias=bias is not None,
            cached=solution.cached,
        )

    def parameter(value: Tensor) -> nn.Parameter:
        # A copy: solvers hand out slices of one SVD, and what is saved must not share memory.
        stored = value.to(old.weight.dtype).clone(memory_format=torch.contiguous_format)
        return nn.Parameter(stored, requires_grad=old.weight.requires_grad)

    new.narrow.weight = parameter(solution.A.T)
    new.wide.weight = parameter(solution.B[0].T if groups == 1 else solution.B)
    if bias is not None:
        new.wide.bias = parameter(bias)
    return new.train(old.training)
