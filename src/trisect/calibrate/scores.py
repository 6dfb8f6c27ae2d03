"""What softmax sees of each rotation pair: sampled queries, and Grams of their scores.         [math.md S-1]

For a query m and keys n, pair f adds s_f(m, n) to the score. Softmax ignores what is the same for all keys,
so an error counts by its variance under the attention weights p(n | m).

b = batch, t = tokens, h = query heads, k = key heads, g = h / k, P = rotation pairs, q = sampled queries,
p = slots
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trisect.parts import Slots

# Sampled queries per layer over all windows; more settle the Gram, fewer save time.
QUERIES = 2048


@dataclass(frozen=True, kw_only=True)
class Heard:
    """One key head in one window, with the queries sampled there: rotated, the queries scaled."""

    head: int
    query: Tensor  # (g, q, d)
    key: Tensor  # (t, d)
    weights: Tensor  # (g, q, t)
    positions: Tensor  # (q,)


class Reading(Protocol):
    """Something to be summed over sampled queries."""

    def __call__(self, heard: Heard) -> dict[str, Tensor]:
        """Name -> sum over the queries, leading dimension the query heads, or 1 for the key head."""


class QuerySampler:
    """Random queries of every window, the same ones for the same seed."""

    def __init__(self, readings: Sequence[Reading], *, per_window: int, seed: int):
        self.readings = readings
        self.per_window = per_window
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> tuple[dict[str, Tensor], int]:
        """Scaled and rotated queries (b, t, h, d) and keys (b, t, k, d) -> sums and the queries in them."""
        b, t = q.shape[:2]
        count = min(self.per_window, t)
        total: dict[str, Tensor] = {}
        for window in range(b):
            # The first tokens have nothing to choose between.
            positions = torch.randint(t // 8, t, (count,), generator=self.generator).to(q.device)
            rows = None if mask is None else mask[min(window, len(mask) - 1)][:, positions]
            for name, value in self._window(q[window, positions], k[window], positions, rows).items():
                total[name] = total[name] + value if name in total else value
        return total, b * count

    def _window(self, q: Tensor, k: Tensor, positions: Tensor, rows: Tensor | None) -> dict[str, Tensor]:
        """(q, h, d), (t, k, d) -> sums, one key head at a time to bound memory."""
        heads = k.shape[1]
        q = q.unflatten(1, (heads, -1)).permute(1, 2, 0, 3).float()  # (k, g, q, d)
        k = k.transpose(0, 1).float()  # (k, t, d)
        hidden = torch.arange(k.shape[1], device=k.device) > positions.unsqueeze(-1)  # (q, t)
        parts: dict[str, list[Tensor]] = {}
        for head, (query, key) in enumerate(zip(q, k, strict=True)):
            seen = (query @ key.mT).masked_fill(hidden, float("-inf"))  # (g, q, t)
            if rows is not None:
                rows_t = rows[..., : k.shape[1]]
                seen = seen.masked_fill(
                    ~rows_t if rows_t.dtype == torch.bool else rows_t < -1e4, float("-inf")
                )
            weights = seen.softmax(dim=-1)
            heard = Heard(head=head, query=query, key=key, weights=weights, positions=positions)
            for reading in self.readings:
                for name, value in reading(heard).items():
                    parts.setdefault(name, []).append(value)
        return {name: torch.cat(values) for name, values in parts.items()}


class PairGrams:
    """Gram (h, 2P, 2P) of every pair's share s of the score and of its quadrature t, [s | t]."""

    def __init__(self, num_pairs: int):
        self.num_pairs = num_pairs

    def __call__(self, heard: Heard) -> dict[str, Tensor]:
        """Both are linear in the key, so the key's covariance (2P x 2P per query) is all that is summed over
        tokens: s = q1 k1 + q2 k2 and t = q1 k2 - q2 k1.
        """
        P = self.num_pairs
        cov = covariance(heard.key[:, : 2 * P], heard.weights)  # (g, q, 2P, 2P)
        query = heard.query[..., : 2 * P]
        return {"scores": turned(query, turned(query, cov).mT).sum(dim=1).double()}


class KeyCovariances:
    """Covariance (k, P, P) of the keys' pairs as complex numbers, in the frame of the query that looks.

    Relative to the query, near keys hardly turn; in absolute positions the slow pairs would seem unrelated.
    """

    def __init__(self, rates: Tensor):
        self.rates = rates  # (k, P)

    def __call__(self, heard: Heard) -> dict[str, Tensor]:
        P, theta = self.rates.shape[-1], self.rates[heard.head]
        key = as_complex(heard.key, P)  # (t, P)
        key = key - key.mean(dim=0)
        mean = heard.weights.to(key.dtype) @ key  # (g, q, P)
        second = (heard.weights.unsqueeze(-1) * key.conj()).mT @ key  # (g, q, P, P)
        cov = second - mean.conj().unsqueeze(-1) * mean.unsqueeze(-2)
        gaps = theta.unsqueeze(-1) - theta  # (P, P)
        frame = phases(gaps, heard.positions[:, None, None])  # (q, P, P)
        return {"keys": (cov.sum(dim=0) * frame).sum(dim=0, keepdim=True).to(torch.complex128)}


class SlotGrams:
    """For each set of slots the Gram (h, 2p, 2p) of [s | t], and its product with what all pairs score.

    Channels that do not rotate have maps of their own, so their share of the score is not the slots' to fit.
    """

    def __init__(self, slots: Sequence[Slots], rates: Tensor):
        self.slots = slots
        self.rates = rates  # (k, P) of the pairs the slots stand in for

    def __call__(self, heard: Heard) -> dict[str, Tensor]:
        rotated = 2 * self.rates.shape[-1]
        scores = heard.query[..., :rotated] @ heard.key[:, :rotated].mT  # (g, q, t)
        mean = (heard.weights * scores).sum(dim=-1, keepdim=True)
        centred = heard.weights * (scores - mean)  # nothing where the weight is nothing
        energy = (centred * (scores - mean)).sum(dim=(-2, -1)).double()  # (g,)
        found = {}
        for number, slots in enumerate(self.slots):
            query, key = self._turned_to(slots, heard)
            cov = covariance(key, heard.weights)
            cross = (centred @ key).unsqueeze(-1)  # (g, q, 2p, 1)
            found[f"slots{number}_gram"] = turned(query, turned(query, cov).mT).sum(dim=1).double()
            found[f"slots{number}_cross"] = turned(query, cross).squeeze(-1).sum(dim=1).double()
            found[f"slots{number}_energy"] = energy
        return found

    def _turned_to(self, slots: Slots, heard: Heard) -> tuple[Tensor, Tensor]:
        """Queries (g, q, 2p) and keys (t, 2p) in the slots, turned at the slots' rates."""
        i, P = heard.head, self.rates.shape[-1]
        times = torch.arange(len(heard.key), device=heard.key.device)

        def through(x: Tensor, maps: Tensor, at: Tensor) -> Tensor:
            still = as_complex(x, P) * phases(-self.rates[i], at)
            moved = (still @ maps[i].to(still.dtype)) * phases(slots.rates[i], at)
            return torch.cat([moved.real, moved.imag], dim=-1).float()

        key = through(heard.key, slots.k_map, times.unsqueeze(-1))
        return through(heard.query, slots.q_map, heard.positions.unsqueeze(-1)), key


def covariance(key: Tensor, weights: Tensor) -> Tensor:
    """(t, n) and (g, q, t) -> (g, q, n, n)."""
    key = key - key.mean(dim=0)  # a shift that no covariance sees, and that saves its digits
    mean = weights @ key  # (g, q, n)
    return (weights.unsqueeze(-1) * key).mT @ key - mean.unsqueeze(-1) * mean.unsqueeze(-2)


def turned(query: Tensor, x: Tensor) -> Tensor:
    """Map the second last dimension from key channels to [s | t]: (g, q, 2p, n) -> (g, q, 2p, n)."""
    p = query.shape[-1] // 2
    q1, q2 = query[..., :p, None], query[..., p:, None]
    k1, k2 = x[..., :p, :], x[..., p:, :]
    return torch.cat([q1 * k1 + q2 * k2, q1 * k2 - q2 * k1], dim=-2)


def as_complex(x: Tensor, num_pairs: int) -> Tensor:
    """(..., d) -> (..., P): the pairs as complex numbers."""
    return torch.complex(x[..., :num_pairs], x[..., num_pairs : 2 * num_pairs])


def phases(rates: Tensor, positions: Tensor) -> Tensor:
    """exp(i rate position), the angle in float64: a long text turns a fast pair thousands of times."""
    angles = rates.double() * positions.double()
    return torch.complex(angles.cos().float(), angles.sin().float())
