"""Fit slots to the scores they stand in for: one complex number per query head and slot.    [math.md E-3]"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# h = query heads, p = slots


@dataclass(frozen=True, kw_only=True)
class SlotScores:
    """Moments of the slots' scores [s | t] and of the true score y over some queries."""

    gram: Tensor  # (h, 2p, 2p)
    cross: Tensor  # (h, 2p)
    energy: Tensor  # (h,)

    def error(self, c: Tensor) -> Tensor:
        """E Var(y - [s | t] c) per head, (h,)."""
        quadratic = (c * (self.gram @ c.unsqueeze(-1)).squeeze(-1)).sum(dim=-1)
        return self.energy - 2 * (c * self.cross).sum(dim=-1) + quadratic

    def joined(self, other: "SlotScores", share: float) -> "SlotScores":
        """`share` of these queries and the rest of the others."""
        return SlotScores(
            gram=share * self.gram + (1 - share) * other.gram,
            cross=share * self.cross + (1 - share) * other.cross,
            energy=share * self.energy + (1 - share) * other.energy,
        )

    def solved(self, ridge: float) -> Tensor:
        """Coefficients (h, 2p) drawn towards leaving every slot as it is.                          [E-3]"""
        start = self.untouched()
        loudness = self.gram.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
        # Not `tiny` itself: a ridge times that has no inverse.
        loudness = loudness.clamp(min=torch.finfo(loudness.dtype).tiny ** 0.5)[:, None, None]
        system = self.gram + ridge * loudness * torch.eye(start.shape[-1]).to(start)
        gap = self.cross - (self.gram @ start.unsqueeze(-1)).squeeze(-1)
        return start + torch.linalg.solve(system, gap.unsqueeze(-1)).squeeze(-1)

    def untouched(self) -> Tensor:
        """The coefficients that leave every slot as it is."""
        c = torch.zeros_like(self.cross)
        c[:, : c.shape[-1] // 2] = 1.0
        return c


def compensate(
    fit: SlotScores, held: SlotScores, *, share: float, ridges: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Coefficients from all queries, and the error (h,) that their ridge left on the held-out ones.

    The ridge is the one that did best there; leaving the slots as they are is always among the choices.
    """
    tried = [(held.error(fit.solved(ridge)), ridge) for ridge in ridges]
    tried.append((held.error(fit.untouched()), float("inf")))
    error, best = min(tried, key=lambda entry: entry[0].sum().item())
    both = fit.joined(held, share)
    return both.untouched() if best == float("inf") else both.solved(best), error
