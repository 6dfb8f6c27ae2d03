"""QK-norm on fewer channels: a calibrated factor that stands in for the channels left out.

RMS-norm divides a head by the root mean square of all its channels. Once some are dropped, the mean over
the rest is a different number; the best constant between the two, and how well it does, follow from the
second moments of the squares.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Denominator:
    """The best constant between two mean squares, head by head, and what it misses."""

    factor: Tensor  # (h,) full mean square ~ factor * kept mean square
    error: Tensor  # (h,) share of the full mean square's energy the factor misses


def denominator(squares: Tensor, kept: Tensor) -> Denominator:
    """Least-squares factor from kept to full mean square.                              [math.md Q-1]

    `squares` (h, d, d) is E[u^T u] with u the squared channels before the norm; `kept` (h, r) indices.
    """
    h, d, _ = squares.shape
    r = kept.shape[-1]
    rows = squares.gather(1, kept.unsqueeze(-1).expand(h, r, d))
    inner = rows.gather(2, kept.unsqueeze(1).expand(h, r, r)).sum(dim=(1, 2)) / r**2
    cross = rows.sum(dim=(1, 2)) / (r * d)
    full = squares.sum(dim=(1, 2)) / d**2
    # A head that never speaks has nothing to correct; one whose kept channels never do cannot be corrected.
    speaks, kept_speak = full > 0, inner > 0
    factor = torch.where(kept_speak, cross / inner, 1.0)
    error = torch.where(kept_speak, 1 - cross.square() / (inner * full), speaks.to(full.dtype))
    return Denominator(factor=factor, error=error)
