"""Factors of positive semi-definite matrices that cannot fail.                      [math.md N-1]"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Roots of ill-conditioned moments lose half their digits, which float32 does not have to spare.
SOLVE_DTYPE = torch.float64

# Directions whose energy is below this share of the mean are silence plus rounding, not signal.
FLOOR = 1e-13


@dataclass(frozen=True, kw_only=True)
class Factor:
    """C = root^T root on the directions kept, with inverse the right inverse of root there."""

    root: Tensor  # (..., d, d)
    inverse: Tensor  # (..., d, d); x = (x inverse) root for every x the moment has seen
    clipped: float
    """Share of directions that fell below the floor and were set to zero."""


def factor(C: Tensor, *, floor: float = FLOOR) -> Factor:
    """Factor a (batch of) second moment(s) by eigendecomposition.

    A Cholesky factor would be as good where it exists; this one also exists for moments of fewer tokens
    than channels, and says how many directions it had to drop.
    """
    C = C.to(SOLVE_DTYPE)
    values, vectors = torch.linalg.eigh((C + C.mT) / 2)
    mean = values.clamp(min=0).mean(dim=-1, keepdim=True)
    alive = values > floor * mean
    safe = torch.where(alive, values, torch.ones_like(values)).sqrt()
    root = torch.where(alive, safe, 0.0).unsqueeze(-1) * vectors.mT
    inverse = vectors * torch.where(alive, 1 / safe, 0.0).unsqueeze(-2)
    clipped = 1.0 - alive.double().mean().item() if alive.numel() else 0.0
    return Factor(root=root, inverse=inverse, clipped=clipped)
