"""Fold rotation pairs of nearly equal frequency into fewer slots.                        [math.md P-1 to P-4]

Pairs are complex numbers that turn at their own rates. Inside a band of nearly equal rates the rotation
almost commutes with complex linear maps, so a band of m pairs can be projected on n < m slots. What the
rotation becomes in the projected space is its Galerkin projection; in its eigenbasis every slot turns by
itself again, at an eigenvalue of the projection (a Ritz value).
"""

import torch
from torch import Tensor

from trisect.solve.psd import SOLVE_DTYPE

# k = key heads, P = pairs, m = pairs of a band, n = slots

SILENCE = 1e-12
"""Added to energies, relative to their mean: a silent pair has nothing to balance."""


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
