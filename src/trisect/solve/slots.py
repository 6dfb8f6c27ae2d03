"""Fit slots to the scores they stand in for: one complex number per query head and slot.    [math.md E-3]"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trisect.solve.lowrank import SOLVE_DTYPE

# k = key heads, P = pairs, m = pairs of a band, n = slots

SILENCE = 1e-12  # added to energies, relative to their mean: a silent pair has nothing to balance


def complex_moment(C: Tensor) -> Tensor:
    """Real second moments (..., 2P, 2P) of [first | second] as E[conj(z_a) z_b], (..., P, P)."""
    P = C.shape[-1] // 2
    C = C.to(SOLVE_DTYPE)
    return torch.complex(C[..., :P, :P] + C[..., P:, P:], C[..., :P, P:] - C[..., P:, :P])


def real_map(M: Tensor) -> Tensor:
    """The complex row map z -> z M, (..., a, b), on [first | second]: (..., 2a, 2b)."""
    top = torch.cat([M.real, M.imag], dim=-1)
    return torch.cat([top, torch.cat([-M.imag, M.real], dim=-1)], dim=-2)


def bands(rates: Tensor, *, spread: float) -> list[list[int]]:
    """Pairs (P,) in bands, slowest first, whose rates differ by less than `spread` radians per token."""
    found: list[list[int]] = []
    for pair in rates.argsort().tolist():
        if found and (rates[pair] - rates[found[-1][0]]).item() < spread:
            found[-1].append(pair)
        else:
            found.append([pair])
    return found


def bilinear_energies(C_k: Tensor, C_q: Tensor) -> Tensor:
    """Eigenvalues (..., m), largest first, of a band's scores: what each further slot could carry. [P-2]"""
    values, vectors = torch.linalg.eigh(_hermitian(C_k))
    root = values.clamp(min=0).sqrt().unsqueeze(-1) * vectors.mH
    energies = torch.linalg.eigvalsh(_hermitian(root @ C_q @ root.mH))
    return energies.flip(-1).clamp(min=0)


def band_slots(C_k: Tensor, C_q: Tensor, rates: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Maps k_map, q_map (k, m, n) and rates (k, n), slowest first, for one band of every head.   [P-3, P-4]

    Each pair is first scaled so that its query and key are equally loud; which changes no score. There an
    orthogonal projection on the loudest directions of both sides keeps the rotation self-adjoint, so the
    slots' rates are real and lie between the band's. What the scaling does to the band as a whole is taken
    back at the end: how much keys vary says little of how large they are, and weights must fit 16 bits.
    """
    loud_k, loud_q = (_energy(C) for C in (C_k, C_q))
    balance = (loud_q / loud_k).pow(0.25)  # (k, m): keys times it, queries over it
    both = C_k * _outer(balance) + C_q / _outer(balance)
    _, vectors = torch.linalg.eigh(_hermitian(both))
    U = vectors[..., -n:]  # (k, m, n)
    slow_to_fast, turn = torch.linalg.eigh(_hermitian(U.mH @ (rates.to(U.dtype).unsqueeze(-1) * U)))
    U, balance = U @ turn, balance / balance.log().mean(dim=-1, keepdim=True).exp()
    return balance.unsqueeze(-1) * U, U / balance.unsqueeze(-1), slow_to_fast


def _energy(C: Tensor) -> Tensor:
    energy = C.diagonal(dim1=-2, dim2=-1).real
    tiny = torch.finfo(energy.dtype).tiny ** 0.5  # a quotient of two of them is still finite
    return energy.clamp(min=0) + (SILENCE * energy.mean(dim=-1, keepdim=True)).clamp(min=tiny)


def _outer(x: Tensor) -> Tensor:
    return x.unsqueeze(-1) * x.unsqueeze(-2)


def _hermitian(C: Tensor) -> Tensor:
    return (C + C.mH) / 2


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


def compensate(fit: SlotScores, held: SlotScores, *, share: float, ridges: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Coefficients from all queries, and the error (h,) that their ridge left on the held-out ones."""
    # The ridge is the one that did best there; leaving the slots as they are is always among the choices.
    tried = [(held.error(fit.solved(ridge)), ridge) for ridge in ridges]
    tried.append((held.error(fit.untouched()), float("inf")))
    error, best = min(tried, key=lambda entry: entry[0].sum().item())
    both = fit.joined(held, share)
    return both.untouched() if best == float("inf") else both.solved(best), error
