"""Which pairs, channels and neurons stay, and what corrects a norm whose mean is then over fewer channels."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
