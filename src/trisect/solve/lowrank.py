"""The best map of low rank when errors in some input directions count more: every weighted SVD is this one.

    min  |L (W - A B)|^2   over A (in, r) and B (r, out)                                     [math.md L-1]

L is the identity, a diagonal, or any root of the inputs' second moment, L^T L = E[x^T x]; in the last case
the minimum is E|x W - x A B|^2 itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trisect.solve.psd import SOLVE_DTYPE, factor

LARGE = 256
"""Matrices with both sides at least this long are solved through their square."""


@dataclass(frozen=True, kw_only=True)
class InputWeight:
    """What an error counts by the input it meets."""

    root: Tensor  # L: (in,) for a diagonal, (in, in) otherwise
    clipped: float = 0.0
    """Share of input directions below the numerical floor: errors there count nothing."""

    def times(self, W: Tensor) -> Tensor:
        """L W."""
        return self.root.unsqueeze(-1) * W if self.root.ndim == 1 else self.root @ W


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """One linear map as two, each pair of column and row with the norm shared evenly between them."""

    A: Tensor  # (in, r)
    B: Tensor  # (r, out)
    loss: float
    """|L (W - A B)|^2, exactly: the squared singular values left out."""
    total: float
    clipped: float


def diagonal_weight(scale: Tensor) -> InputWeight:
    """L = diag(scale), of an (in,) vector without negative entries; zeros are allowed."""
    return InputWeight(root=scale.to(SOLVE_DTYPE))


def gram_weight(gram: Tensor) -> InputWeight:
    """L with L^T L = gram, (in, in), which may be singular.                                 [math.md N-1]"""
    found = factor(gram)
    return InputWeight(root=found.root, clipped=found.clipped)


def low_rank(W: Tensor, rank: int, weight: InputWeight | None = None) -> LowRank:
    """Rank-r factors of W (in, out); without a weight, the plain truncated SVD.             [math.md L-2]

    With L W = U S V^T the papers write A B = L^-1 U_r S_r V_r^T. The same product is W V_r V_r^T, which needs
    no inverse of L and so exists for every L.
    """
    W = W.to(SOLVE_DTYPE)
    seen = W if weight is None else weight.times(W)
    values, Vh, audible = _right_singular(seen)
    rank = min(rank, len(values))
    heard = min(rank, audible)
    B = Vh[:heard]
    A = W @ B.mT
    if heard < rank:
        # The weighted problem is solved with ranks to spare: they go to what no weighted input can tell.
        rest = W - A @ B
        more = _right_singular(rest)[1][: rank - heard]
        A, B = torch.cat([A, rest @ more.mT], dim=1), torch.cat([B, more])
    A, B = _balanced(A, B)
    energy = values.square()
    return LowRank(
        A=A,
        B=B,
        loss=energy[rank:].sum().item(),
        total=energy.sum().item(),
        clipped=0.0 if weight is None else weight.clipped,
    )


def _right_singular(M: Tensor) -> tuple[Tensor, Tensor, int]:
    """Singular values, right singular vectors as rows, largest first, and how many stand above rounding.

    Large matrices go through the eigenvectors of their smaller square, in half the time of an SVD or less;
    what the square loses are directions some seven digits below the loudest.
    """
    eps = torch.finfo(M.dtype).eps * max(M.shape)
    if min(M.shape) < LARGE:
        _, values, Vh = torch.linalg.svd(M, full_matrices=False)
        return values, Vh, int((values > eps * values[:1]).sum())
    wide = M.shape[0] < M.shape[1]
    squares, vectors = torch.linalg.eigh(M @ M.mT if wide else M.mT @ M)
    values = squares.flip(-1).clamp(min=0).sqrt()
    heard = int((values > eps**0.5 * values[:1]).sum())
    V = vectors.flip(-1)
    if wide:
        V = torch.linalg.qr(M.mT @ V[:, :heard] / values[:heard]).Q
    return values, V.mT, heard


def _balanced(A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of B have unit length; afterwards |a_j| = |b_j|, and neither leaves the range of 16 bits."""
    size = A.norm(dim=0)
    scale = torch.where(size > 0, size, 1.0).sqrt()
    return A / scale, scale.unsqueeze(-1) * B
