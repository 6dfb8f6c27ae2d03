"""Backward elimination with compensation: what goes is what the rest can stand in for.

The optimal-brain-surgeon step in two forms: rows of a regression (MLP neurons), and small blocks of features
of several regressions at once (rotation pairs, shared by the query heads of a group).
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trisect.solve.ridge import inverse_positive, unit_system

# Neurons go in at most this many rounds; each round pays one rank-m update of the inverse.
ROUNDS = 64


def eliminate_rows(
    gram: Tensor, W: Tensor, keep: int, *, ridge: float, rounds: int = ROUNDS, overwrite: bool = False
) -> Tensor:
    """Indices (keep,), ascending, of the rows of W whose loss hurts most after refitting.    [math.md E-1]

    Dropping row i and refitting the others costs |w_i|^2 / H_ii with H the inverse Gram. There are never more
    than two matrices of that size at a time; with `overwrite` the Gram is one of them.
    """
    gram, scale = unit_system(gram, ridge, overwrite=overwrite)
    H, W = inverse_positive(gram), W / scale.unsqueeze(-1)
    del gram
    index = torch.arange(len(W), device=W.device)
    per_round = max(1, -(-(len(W) - keep) // rounds))
    failed = torch.zeros((), dtype=torch.int32, device=W.device)
    while len(index) > keep:
        count = min(per_round, len(index) - keep)
        cost = W.square().sum(dim=-1) / H.diagonal()
        order = cost.argsort(stable=True)
        drop, stay = order[:count], order[count:].sort().values
        rows = H[drop]
        # Looked at once, at the end: a GPU would wait for the host in every round.
        update, info = torch.linalg.solve_ex(rows[:, drop], rows)  # (count, n)
        failed += info.abs()
        W = W.addmm_(update.mT, W[drop], alpha=-1.0).index_select(0, stay)
        H = H.addmm_(rows.mT, update, alpha=-1.0).index_select(0, stay)
        H = H.index_select(1, stay)
        index = index[stay]
    if failed:
        raise torch.linalg.LinAlgError(
            "Neurons cannot be eliminated: the inverse Gram lost its definiteness."
        )
    return index


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Pairs kept per key head, and what each query head multiplies them with."""

    kept: Tensor  # (k, p) ascending
    real: Tensor  # (k, g, p)
    quadrature: Tensor  # (k, g, p)
    loss: Tensor  # (k,)
    total: Tensor  # (k,)

    def spread_over(self, key_heads: int) -> "Pairs":
        """Pairs that all heads chose together, as every key head's own."""
        real, quadrature = (x.reshape(key_heads, -1, x.shape[-1]) for x in (self.real, self.quadrature))
        return Pairs(
            kept=self.kept.expand(key_heads, -1),
            real=real,
            quadrature=quadrature,
            loss=self.loss,
            total=self.total,
        )

    def untouched(self) -> "Pairs":
        """The same pairs, multiplied with nothing."""
        return replace(self, real=torch.ones_like(self.real), quadrature=torch.zeros_like(self.quadrature))

    def judged(self, G: Tensor) -> "Pairs":
        """With what they miss of the scores behind a Gram as their loss: no ridge, and any coefficients."""
        return replace(self, loss=self.error(G).sum(dim=-1))

    def error(self, G: Tensor) -> Tensor:
        """What these pairs miss of the scores behind another Gram (k, g, 2P, 2P): (k, g)."""
        k, g, twice, _ = G.shape
        index = self.kept.unsqueeze(1).expand(k, g, -1)
        gap = torch.zeros(k, g, twice, dtype=G.dtype, device=G.device)
        gap[..., : twice // 2] = -1.0
        gap = gap.scatter_add(-1, index, self.real).scatter_add(-1, index + twice // 2, self.quadrature)
        return (gap.unsqueeze(-2) @ G @ gap.unsqueeze(-1)).squeeze(-1).squeeze(-1)


def eliminate_pairs(G: Tensor, keep: int, *, ridge: float, quadrature: bool = True) -> Pairs:
    """Drop rotation pairs while the kept ones, each times a complex number, stand in.       [math.md E-2]

    `G` (k, g, 2 P, 2 P) is the Gram of every pair's share s of the score and of its quadrature t, [s | t],
    for the g query heads of k key heads. The sum of all s is regressed on the kept s and t.
    """
    k, g, twice, _ = G.shape
    P, B = twice // 2, 2 if quadrature else 1
    G = G[..., : B * P, : B * P]
    total = G[..., :P, :P].sum(dim=(-3, -2, -1))  # (k,)
    # Not `tiny` itself: a ridge times that has no inverse.
    least_mean = torch.finfo(G.dtype).tiny ** 0.5
    mean = G.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None].clamp(min=least_mean)
    H = torch.linalg.inv(G + ridge * mean * torch.eye(B * P, dtype=G.dtype, device=G.device))
    c = torch.zeros(k, g, B * P, dtype=G.dtype, device=G.device)
    c[..., :P] = 1.0
    ids = torch.arange(P, device=G.device).repeat(k, 1)
    loss = torch.zeros_like(total)
    for n in range(P, keep, -1):
        cost = _block_costs(H, c, n, B)  # (k, n)
        least, gone = cost.min(dim=-1)
        loss = loss + least
        stay = _others(gone, n)  # (k, n - 1)
        H, c = _without(H, c, _features(gone.unsqueeze(-1), n, B), _features(stay, n, B))
        ids = ids.gather(-1, stay)
    real = c[..., :keep]
    zero = torch.zeros_like(real)
    return Pairs(
        kept=ids, real=real, quadrature=c[..., keep:] if quadrature else zero, loss=loss, total=total
    )


def _block_costs(H: Tensor, c: Tensor, n: int, B: int) -> Tensor:
    """What dropping each pair costs, summed over the group: c_b^T (H_bb)^-1 c_b."""
    blocks = H.unflatten(-1, (B, n)).unflatten(-3, (B, n)).diagonal(dim1=-3, dim2=-1)  # (k, g, B, B, n)
    blocks = blocks.movedim(-1, 2)  # (k, g, n, B, B)
    shares = c.unflatten(-1, (B, n)).mT  # (k, g, n, B)
    solved = torch.linalg.solve(blocks, shares.unsqueeze(-1)).squeeze(-1)
    return (shares * solved).sum(dim=-1).sum(dim=1)


def _others(gone: Tensor, n: int) -> Tensor:
    """(k,) -> (k, n - 1): every index but one, in order."""
    index = torch.arange(n - 1, device=gone.device).expand(len(gone), -1)
    return index + (index >= gone.unsqueeze(-1))


def _features(pairs: Tensor, n: int, B: int) -> Tensor:
    """Feature columns of the given pairs: their s, then their t."""
    return torch.cat([pairs + n * block for block in range(B)], dim=-1)


def _without(H: Tensor, c: Tensor, drop: Tensor, stay: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse Gram and coefficients after the features at `drop` (k, b) are gone."""
    rows = _take(H, drop, -2)  # (k, g, b, n)
    update = torch.linalg.solve(_take(rows, drop, -1), rows)
    c = c - (_take(c.unsqueeze(-2), drop, -1) @ update).squeeze(-2)
    H = H - rows.mT @ update
    return _take(_take(H, stay, -2), stay, -1), _take(c.unsqueeze(-2), stay, -1).squeeze(-2)


def _take(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Gather (k, m) indices along `dim` of (k, g, a, b)."""
    index = index[:, None, :, None] if dim == -2 else index[:, None, None, :]
    shape = list(x.shape)
    shape[dim] = index.shape[dim]
    return x.gather(dim, index.expand(shape))
