"""Which pairs, channels and neurons stay, and what corrects a norm whose mean is then over fewer channels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trisect.solve.lowrank import SOLVE_DTYPE


def pair_scores(q_energy: Tensor, k_energy: Tensor, num_pairs: int) -> Tensor:
    """lambda of each rotation pair: E[q_i^2] E[k_i^2] summed over its two channels.    [math.md R-1]"""
    # Energies are (h_kv, d) with the pair's channels at i and i + num_pairs; queries summed over the group.
    channel = q_energy * k_energy
    return channel[..., :num_pairs] + channel[..., num_pairs : 2 * num_pairs]


def neuron_scores(energy: Tensor, W_down: Tensor) -> Tensor:
    """lambda_i = E[x_i^2] |w_i|^2 of each MLP neuron; W_down is (I, D).                [math.md M-1]"""
    return energy * W_down.to(energy.dtype).square().sum(dim=-1)


def top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices of the `count` largest scores along the last dimension, ascending, and the sum of the rest."""
    # A stable sort decides ties by position, so that the same scores keep the same indices everywhere.
    order = scores.argsort(dim=-1, descending=True, stable=True)
    kept = order[..., :count].sort(dim=-1).values
    return kept, scores.gather(-1, order[..., count:]).sum(dim=-1)


@dataclass(frozen=True, kw_only=True)
class Channels:
    """Channels that stay or go as they are, where nothing may mix them; otherwise as a Basis."""

    values: Tensor  # (k, d) the energy of each channel
    clipped: float = 0.0

    def kept(self, rank: int) -> Tensor:
        """(k, rank) the channels that stay."""
        return top(self.values, rank)[0]

    def maps(self, rank: int) -> tuple[Tensor, Tensor]:
        """(k, d, rank) with a one for each of those, for both sides."""
        whole = torch.eye(self.values.shape[-1], dtype=self.values.dtype, device=self.values.device)
        chosen = whole[self.kept(rank)].mT
        return chosen, chosen

    def loss(self, rank: int) -> Tensor:
        """What goes with the others."""
        return top(self.values, rank)[1]

    @property
    def total(self) -> Tensor:
        return self.values.sum(dim=-1)


def split_width(pair_scores: Tensor, slot_values: Tensor, width: int) -> int:
    """How many rotation pairs a head of `width` channels keeps beside its unrotated slots.   [math.md R-2]"""
    # Scores (h_kv, pairs) and slot energies (h_kv, slots) are in the same unit. Every head of a layer must
    # get the same number, so all splits are priced over all heads and the cheapest wins.
    num_pairs, num_slots = pair_scores.shape[-1], slot_values.shape[-1]
    fewest = max(0, -(-(width - num_slots) // 2))
    most = min(num_pairs, width // 2)
    if fewest > most:
        raise ValueError(f"{num_pairs} pairs and {num_slots} plain channels cannot make a head of {width}")
    lost = _dropped_by_count(pair_scores)  # (pairs + 1,)
    silent = _dropped_by_count(slot_values)  # (slots + 1,)
    candidates = torch.arange(fewest, most + 1)
    slots = (width - 2 * candidates).clamp(max=num_slots)
    return int(candidates[(lost[candidates] + silent[slots]).argmin()])


def _dropped_by_count(scores: Tensor) -> Tensor:
    """Entry n: energy lost over all heads when each keeps its n best."""
    descending = scores.sort(dim=-1, descending=True).values.sum(dim=0).cpu()
    kept = torch.cat([descending.new_zeros(1), descending.cumsum(0)])
    return kept[-1] - kept


def denominator(squares: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Least-squares factor (h,) from kept to full mean square, and the share it misses.    [math.md Q-1]"""
    # `squares` (h, d, d) is E[u^T u] with u the squared channels before the norm; `kept` (h, r) indices.
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
    return factor, error


# Slots that stand in for pairs, and what each query head multiplies them with.       [math.md E-3, P-1 to P-4]
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
    """Maps k_map, q_map (k, m, n) and rates (k, n), slowest first, for one band of every head.   [P-3, P-4]"""
    # Each pair is first scaled so that its query and key are equally loud; which changes no score. There an orthogonal
    # projection on the loudest directions of both sides keeps the rotation self-adjoint, so the slots' rates are real
    # and lie between the band's. What the scaling does to the band as a whole is taken back at the end: how much keys
    # vary says little of how large they are, and weights must fit 16 bits.
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
        theirs = vars(other)
        return SlotScores(**{name: share * mine + (1 - share) * theirs[name] for name, mine in vars(self).items()})

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
