"""How outputs of attention and MLP join the residual stream: as they are, times a factor, or behind a norm."""

from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from trisect.models.heads import QUIET, gain, post_norm
from trisect.models.linear import bias_of
from trisect.models.view import LayerView


@dataclass(frozen=True, kw_only=True)
class Join:
    """What lies between an output projection and the residual stream.                          [math.md F-7]"""

    scale: float
    norm: tuple[Tensor, float] | None  # weights (D,) and epsilon
    gain: Tensor | None  # (D,) the unit that a part has each channel in
    bias: Tensor | None

    def added(self, output: Tensor) -> Tensor:
        """What the stream gets of an output, its bias left out in both: narrow and dense model share it."""
        if self.norm is None:
            return self.scale * output
        whole = output if self.bias is None else output + self.bias
        return self.scale * self.norm[0] * whole / self._size(output)

    def target(self, output: Tensor, gap: Tensor) -> Tensor:
        """The output, in the part's unit, with which the stream gets `gap` more than with the dense one."""
        if self.norm is None:
            return output + gap / self.scale
        assert self.gain is not None
        weight = self.norm[0]
        live = weight.abs() >= QUIET * weight.abs().max()
        share = torch.where(live, 1 / torch.where(live, self.scale * weight, 1.0), 0.0)
        return (output + gap * share * self._size(output)) * self.gain

    def weight(self, output: Tensor) -> Tensor | float:
        """How much of an error of the output the stream gets, squared: (b, t), or the same for all tokens."""
        return self.scale**2 if self.norm is None else (self.scale / self._size(output).squeeze(-1)).square()

    def _size(self, output: Tensor) -> Tensor:
        """Root mean square (b, t, 1) that the norm divides by."""
        assert self.norm is not None
        whole = output if self.bias is None else output + self.bias
        return (whole.square().mean(dim=-1, keepdim=True) + self.norm[1]).sqrt()


def join_of(view: LayerView, component: str) -> Join:
    """The way of a layer's OV or MLP."""
    scales, name = view.family.residual_scale, "down" if component == "mlp" else "o"
    return Join(
        scale=1.0 if scales is None else float(attrgetter(scales[component == "mlp"])(view.layer)),
        norm=post_norm(view.layer, view.family, component),
        gain=gain(view.layer, view.family, component),
        bias=bias_of(view.module(name)) if name in view.linears() else None,
    )
