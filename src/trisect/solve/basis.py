"""The best narrow pair for a bilinear form: query with key, or attended value with output weight.

Both of the paper's SVD problems are one problem. Rows x and y of width d meet only in the product x y^T:
keys with queries in QK, head outputs with the output projection's columns in OV. Given the second moments
C_x and C_y (d x d), find maps so that (x x_map) (y y_map)^T of width r is closest to x y^T.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trisect.solve.psd import SOLVE_DTYPE, factor

# Balancing divides by a singular value's root; below this share of the largest there is nothing to balance.
BALANCE_FLOOR = 1e-12


@dataclass(frozen=True, kw_only=True)
class Basis:
    """All ranks of one bilinear problem at once: any width is a slice of it."""

    values: Tensor  # (..., d) eigenvalues of S, largest first: the energy of each slot
    x_slots: Tensor  # (..., d, d) x -> slots of unit energy
    y_slots: Tensor  # (..., d, d) y -> slots that carry the energy
    clipped: float

    def maps(self, rank: int) -> tuple[Tensor, Tensor]:
        """x_map and y_map of shape (..., d, rank), the energy shared evenly between the two sides."""
        values = self.values[..., :rank]
        largest = self.values[..., :1].clamp(min=torch.finfo(SOLVE_DTYPE).tiny)
        scale = (values / largest).clamp(min=BALANCE_FLOOR).mul(largest).pow(0.25).unsqueeze(-2)
        return self.x_slots[..., :rank] * scale, self.y_slots[..., :rank] / scale

    def loss(self, rank: int) -> Tensor:
        """What a width of `rank` loses, exactly: the eigenvalues left out.             [math.md B-3]"""
        return self.values[..., rank:].sum(dim=-1)

    @property
    def total(self) -> Tensor:
        return self.values.sum(dim=-1)


def shared_basis(C_x: Tensor, C_y: Tensor) -> Basis:
    """Solve  min E |x (I - P) y^T|^2  over rank-r maps P, for every r at once.     [math.md B-1, B-2]

    C_x = F^T F, S = F C_y F^T = V diag(values) V^T; the slots are x F^+ V and y F^T V. Leading
    dimensions are a batch of problems (heads).
    """
    F = factor(C_x)
    S = F.root @ C_y.to(SOLVE_DTYPE) @ F.root.mT
    values, V = torch.linalg.eigh((S + S.mT) / 2)
    values, V = values.flip(-1).clamp(min=0), V.flip(-1)
    return Basis(values=values, x_slots=F.inverse @ V, y_slots=F.root.mT @ V, clipped=F.clipped)
