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

MOST_NUMBERS = 1 << 26
"""Of the largest tensor that one step makes: heads are taken a few at a time to stay below."""

WINDOWS_APART = 1_000_003
"""Seeds of neighbouring layers are further apart than there are windows."""


@dataclass(frozen=True, kw_only=True)
class Heard:
    """Some key heads in one window, with the queries sampled there: rotated, the queries scaled."""

    heads: slice
    query: Tensor  # (k, g, q, d)
    key: Tensor  # (k, t, d)
    weights: Tensor  # (k, g, q, t)
    positions: Tensor  # (q,)


class Reading(Protocol):
    """Something to be summed over sampled queries."""

    def __call__(self, heard: Heard) -> dict[str, Tensor]:
        """Name -> sum over the queries, leading dimension the query heads or the key heads."""


class QuerySampler:
    """Random queries of every window: the same for the same seed, whoever runs it, in whatever batch."""

    def __init__(self, readings: Sequence[Reading], *, per_window: int, seed: int):
        self.readings = readings
        self.per_window = per_window
        self.seed = seed
        self.numbers: Sequence[int] | None = None
        """Which windows the batch at hand holds; None means the first ones."""

    def __call__(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> tuple[dict[str, Tensor], int]:
        """Scaled and rotated queries (b, t, h, d) and keys (b, t, k, d) -> sums and the queries in them."""
        b, t = q.shape[:2]
        total: dict[str, Tensor] = {}
        for window in range(b):
            number = window if self.numbers is None else self.numbers[window]
            positions = self.positions(number, t).to(q.device)
            rows = None if mask is None else mask[min(window, len(mask) - 1)][:, positions]
            for name, value in self._window(q[window, positions], k[window], positions, rows).items():
                total[name] = total[name] + value if name in total else value
        return total, b * min(self.per_window, t)

    def positions(self, number: int, tokens: int) -> Tensor:
        """The queries (q,) of a window; the first tokens have nothing to choose between."""
        generator = torch.Generator().manual_seed(self.seed * WINDOWS_APART + number)
        count = min(self.per_window, tokens)
        return torch.randint(tokens // 8, tokens, (count,), generator=generator)

    def _window(self, q: Tensor, k: Tensor, positions: Tensor, rows: Tensor | None) -> dict[str, Tensor]:
        """(q, h, d), (t, k, d) -> sums, as many key heads at a time as memory allows."""
        t, heads, d = k.shape
        q = q.unflatten(1, (heads, -1)).permute(1, 2, 0, 3).float()  # (k, g, q, d)
        k = k.transpose(0, 1).float()  # (k, t, d)
        hidden = torch.arange(t, device=k.device) > positions.unsqueeze(-1)  # (q, t)
        if rows is not None:
            rows = rows[..., :t]
            hidden = hidden | (~rows if rows.dtype == torch.bool else rows < -1e4)
        parts: dict[str, list[Tensor]] = {}
        at_once = max(1, MOST_NUMBERS // (q[0, ..., 0].numel() * t * d))
        for start in range(0, heads, at_once):
            some = slice(start, start + at_once)
            query, key = q[some], k[some]
            seen = (query.flatten(1, 2) @ key.mT).unflatten(1, query.shape[1:3])  # (k, g, q, t)
            weights = seen.masked_fill(hidden, float("-inf")).softmax(dim=-1)
            heard = Heard(heads=some, query=query, key=key, weights=weights, positions=positions)
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
        cov = covariance(heard.key[..., : 2 * P], heard.weights)  # (k, g, q, 2P, 2P)
        query = heard.query[..., : 2 * P]
        return {"scores": turned(query, turned(query, cov).mT).sum(dim=2).flatten(0, 1).double()}


class KeyCovariances:
    """Covariance (k, P, P) of the keys' pairs as complex numbers, in the frame of the query that looks.

    Relative to the query, near keys hardly turn; in absolute positions the slow pairs would seem unrelated.
    """

    def __init__(self, rates: Tensor):
        self.rates = rates  # (k, P)

    def __call__(self, heard: Heard) -> dict[str, Tensor]:
        P, theta = self.rates.shape[-1], self.rates[heard.heads]  # (k, P)
        key = as_complex(heard.key, P)  # (k, t, P)
        key = key - key.mean(dim=1, keepdim=True)
        mean = (heard.weights.flatten(1, 2).to(key.dtype) @ key).unflatten(1, heard.weights.shape[1:3])
        # The query heads of a key head look at the same keys: only their sum is asked for.
        second = weighted(key.conj(), heard.weights.sum(dim=1), key)  # (k, q, P, P)
        cov = second - (mean.conj().unsqueeze(-1) * mean.unsqueeze(-2)).sum(dim=1)
        gaps = theta.unsqueeze(-1) - theta.unsqueeze(-2)  # (k, P, P)
        frame = phases(gaps.unsqueeze(1), heard.positions[:, None, None])  # (k, q, P, P)
        return {"keys": (cov * frame).sum(dim=1).to(torch.complex128)}


class SlotGrams:
    """For each set of slots the Gram (h, 2p, 2p) of [s | t], and its product with what all pairs score.

    Channels that do not rotate have maps of their own, so their share of the score is not the slots' to fit.
    """

    def __init__(self, slots: Sequence[Slots], rates: Tensor):
        self.slots = slots
        self.rates = rates  # (k, P) of the pairs the slots stand in for

    def __call__(self, heard: Heard) -> dict[str, Tensor]:
        rotated = 2 * self.rates.shape[-1]
        scores = heard.query[..., :rotated] @ heard.key[..., :rotated].mT.unsqueeze(1)  # (k, g, q, t)
        mean = (heard.weights * scores).sum(dim=-1, keepdim=True)
        centred = heard.weights * (scores - mean)  # nothing where the weight is nothing
        energy = (centred * (scores - mean)).sum(dim=(-2, -1)).flatten().double()  # (h,)
        found = {}
        for number, slots in enumerate(self.slots):
            query, key = self._turned_to(slots, heard)
            cov = covariance(key, heard.weights)
            cross = (centred @ key.unsqueeze(1)).unsqueeze(-1)  # (k, g, q, 2p, 1)
            gram = turned(query, turned(query, cov).mT).sum(dim=2)
            found[f"slots{number}_gram"] = gram.flatten(0, 1).double()
            found[f"slots{number}_cross"] = turned(query, cross).squeeze(-1).sum(dim=2).flatten(0, 1).double()
            found[f"slots{number}_energy"] = energy
        return found

    def _turned_to(self, slots: Slots, heard: Heard) -> tuple[Tensor, Tensor]:
        """Queries (k, g, q, 2p) and keys (k, t, 2p) in the slots, turned at the slots' rates."""
        P, some = self.rates.shape[-1], heard.heads
        times = torch.arange(heard.key.shape[1], device=heard.key.device)

        def through(x: Tensor, maps: Tensor, at: Tensor) -> Tensor:
            """(k, n, d) at times (n,) -> (k, n, 2p)."""
            still = as_complex(x, P) * phases(-self.rates[some].unsqueeze(1), at.unsqueeze(-1))
            moved = still @ maps[some].to(still.dtype)
            moved = moved * phases(slots.rates[some].unsqueeze(1), at.unsqueeze(-1))
            return torch.cat([moved.real, moved.imag], dim=-1).float()

        g = heard.query.shape[1]
        query = through(heard.query.flatten(1, 2), slots.q_map, heard.positions.repeat(g))
        return query.unflatten(1, (g, -1)), through(heard.key, slots.k_map, times)


def covariance(key: Tensor, weights: Tensor) -> Tensor:
    """(k, t, n) and (k, g, q, t) -> (k, g, q, n, n)."""
    key = key - key.mean(dim=1, keepdim=True)  # a shift that no covariance sees, and that saves its digits
    queries = weights.flatten(1, 2)  # (k, g q, t)
    mean = queries @ key  # (k, g q, n)
    cov = weighted(key, queries, key) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    return cov.unflatten(1, weights.shape[1:3])


def weighted(left: Tensor, weights: Tensor, right: Tensor) -> Tensor:
    """Products (k, q, n, m) of (k, t, n) and (k, t, m), summed over t with the weights (k, q, t)."""
    product = weights.unsqueeze(-2) * left.mT.unsqueeze(1)  # (k, q, n, t)
    return (product.flatten(1, 2) @ right).unflatten(1, product.shape[1:3])


def turned(query: Tensor, x: Tensor) -> Tensor:
    """Map the second last dimension from key channels to [s | t]: (..., 2p, n) -> (..., 2p, n)."""
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
