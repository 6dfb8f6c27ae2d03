"""Regressions behind a cut, read from moments: features, target, and what holds weights back. [F-1, F-6]"""

from dataclasses import replace

import torch
from torch import Tensor

from trisect.methods.method import need
from trisect.parts import OV, Moments
from trisect.solve import Regression


def regressions(moments: Moments, name: str) -> tuple[Regression, Regression]:
    """The fitting problem and its held-out twin."""

    def problem(suffix: str) -> Regression:
        return Regression(
            gram=need(moments, f"{name}_gram{suffix}"),
            cross=need(moments, f"{name}_target{suffix}"),
            energy=need(moments, f"{name}_energy{suffix}"),
            tokens=need(moments, f"{name}_tokens{suffix}").item(),
        )

    return problem(""), problem("_held")


def output_regressions(part: OV, moments: Moments) -> tuple[Regression, Regression, Regression]:
    """Fitting, held-out and joined problem of W_o, with what heads could put out as the penalty.   [F-6]

    A head that rests on the first token puts out next to nothing in most directions, on calibration text.
    What it would put out if it attended elsewhere is the second moment of its values; weights are held to
    the prior in that unit, or they would grow until they make sense of the nothing.
    """
    fit, held = regressions(moments, "a")
    both = fit.joined(held)
    h = part.heads
    own = both.gram.unflatten(0, (h, -1)).unflatten(-1, (h, -1)).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    values = need(moments, "a_values").to(own)  # (k, d, d)
    penalty = torch.block_diag(*(own + values.repeat_interleave(h // len(values), dim=0)))
    return replace(fit, penalty=penalty), replace(held, penalty=penalty), replace(both, penalty=penalty)


def projected(penalty: Tensor, features: Tensor, W: Tensor) -> Tensor:
    """The weights in the narrow features that come closest to W, every head by itself."""
    weighted = penalty @ features  # (h d, h r)
    system = features.mT @ weighted
    system.diagonal().add_(1e-9 * system.diagonal().mean())
    return torch.linalg.solve(system, weighted.mT @ W)
