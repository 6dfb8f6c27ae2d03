"""Norms of heads that keep different channels; and those between outputs and the residual stream.   [math.md F-7]"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trisect.models.families import Family
from trisect.records.parts import MLP, OV, Part


class HeadNorm(nn.Module):
    """RMS-norm of (..., heads, width), weights per head; float32 inside as in stock."""

    # The mean is each head's own, or with `together` one over all heads.

    def __init__(self, heads: int, width: int, eps: float, *, together: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, width))
        self.eps, self.dims = eps, (-2, -1) if together else (-1,)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(self.dims, keepdim=True) + self.eps)
        # The last step keeps vLLM from taking this for a norm with one set of weights, and replacing it.
        return (self.weight * wide.to(x.dtype)).view_as(x)


def norm_weights(norm: Any, *, heads: int, width: int, offset: float) -> Tensor:
    """What a norm of heads multiplies their channels with, (heads, width), however its modules hold it."""
    if isinstance(norm, HeadNorm):
        return norm.weight.detach()
    held = [weight.detach() for name, weight in norm.named_parameters() if name.endswith("weight")]
    if not held:
        return torch.ones(heads, width)
    weights = torch.cat([weight.flatten() for weight in held])
    weights = weights.float() + offset if offset else weights
    return weights.reshape(-1, width).expand(heads, -1)


def eps_of(norm: Any) -> Any:
    """What a norm adds to the mean square, by either of the names in use; None if it has neither."""
    return getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)


QUIET = 2.0**-10  # share of a post-norm's largest weight below which a channel counts as silent


def post_norm(layer: nn.Module, family: Family, component: str) -> tuple[Tensor, float] | None:
    """Weights (D,) and epsilon of the RMS-norm between a component's output and the residual stream."""
    if family.post_norms is None:
        return None
    attention, mlp = family.post_norms
    norm: Any = layer.get_submodule(mlp if component == "mlp" else attention)
    return norm.weight.detach().float() + family.norm_offset, eps_of(norm)


def gain(layer: nn.Module, family: Family, component: str) -> Tensor | None:
    """What output channels (D,) of OV or MLP are multiplied with in a part."""
    # A post-norm multiplies them by its weights: the nearest powers of two, which no rounding sees.
    found = post_norm(layer, family, component)
    if found is None:
        return None
    size = found[0].abs()
    size = size.clamp(min=size.max().clamp(min=torch.finfo(size.dtype).tiny) * QUIET)
    return torch.ldexp(torch.ones_like(size), size.log2().round().int())


def in_units(part: Part, layer: nn.Module, family: Family, *, inverse: bool = False) -> Part:
    """A part with its outputs times their gain, or over it; in float32 at least, whose range they stay in."""
    name = "ov" if isinstance(part, OV) else "mlp"
    unit = gain(layer, family, name) if isinstance(part, OV | MLP) else None
    if unit is None:
        return part
    unit = 1 / unit if inverse else unit

    def times(x: Tensor | None) -> Any:
        return None if x is None else x.to(torch.promote_types(x.dtype, torch.float32)) * unit.to(x.device)

    if isinstance(part, OV):
        return replace(part, W_o=times(part.W_o), b_o=times(part.b_o))
    assert isinstance(part, MLP)
    return replace(part, W_down=times(part.W_down), b_down=times(part.b_down))
