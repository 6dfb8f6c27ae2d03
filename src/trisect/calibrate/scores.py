"""What softmax sees of each rotation pair: sampled queries, and Grams of their scores.         [math.md S-1]

For a query m and keys n, pair f adds s_f(m, n) to the score. Softmax ignores what is the same for all keys,
so an error counts by its variance under the attention weights p(n | m).

b = batch, t = tokens, h = query heads, k = key heads, g = h / k, P = rotation pairs, q = sampled queries,
p = slots, r = rows: key heads of windows, all those of one window side by side, m = p (p + 1) / 2
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from trisect.models.heads import softcapped
from trisect.records.parts import Slots

QUERIES = 1024  # sampled per layer over all windows; more settle the Gram, fewer save time
FEWEST = 16
"""Of a window, where there are many: what costs is looking at its keys, not at how a query weighs them."""
FEW_QUERIES = 64  # of a short window, at most
MOST_APART = 8  # windows from one that is sampled to the next: some of those held out must be among them
MOST_NUMBERS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Of the largest tensor that one step makes: windows, or else heads, are taken together as long as they stay
below. A CPU is faster on what its caches hold; a GPU waits for every operation, and gets few and large ones."""
STRETCHES = 8  # of the keys, at least: later ones are spared the early queries, nearly half of the work
AWAKE = 1e-3
"""Share of a query's attention that is taken to go to all visible keys alike. A head that rests on one key
says nothing of the others; on other text it may look at them."""
WINDOWS_APART = 1_000_003  # seeds of neighbouring layers are further apart than there are windows


@dataclass(frozen=True, kw_only=True)
class SampledQueries:
    """Key heads of some windows, with the queries sampled there: rotated, the queries scaled."""

    heads: Tensor  # (r,) which key head each row is
    query: Tensor  # (r, g, q, d)
    key: Tensor  # (r, t, d)
    weights: Tensor  # (r, g, q, t)
    positions: Tensor  # (r, q)
    stretches: Sequence[tuple[slice, int]]
    """Some keys each, and the first query that may look at any of them: on those before it they weigh nothing."""

    known: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def covariances(self, num_pairs: int) -> tuple[Tensor, Tensor]:
        """Those of the first pairs, for whoever asks: computed once."""
        if num_pairs not in self.known:
            self.known[num_pairs] = covariances(self.key[..., : 2 * num_pairs], self.weights, self.stretches)
        return self.known[num_pairs]


Reading = Callable[[SampledQueries], dict[str, Tensor]]
"""Gives name -> sum over a row's queries, leading dimension the rows, or the query heads of all rows."""


def shares(windows: int, tokens: int) -> tuple[int, int]:
    """Queries per window, and how many windows there are to one that is sampled."""
    every = min(MOST_APART, -(-windows * FEWEST // QUERIES))
    # Queries of one window see much the same keys: many of them in a short window teach little more.
    return min(-(-QUERIES * every // windows), max(FEW_QUERIES, tokens // 8)), every


class QuerySampler:
    """Random queries of one window in `every`: the same for the same seed, whoever runs it, in whatever batch."""

    def __init__(
        self, readings: Sequence[Reading], *, per_window: int, seed: int, every: int = 1, softcap: float | None = None
    ):
        self.readings = readings
        self.softcap = softcap
        self.per_window, self.every = per_window, every
        self.seed = seed
        self.numbers: Sequence[int | None] | None = None
        """Which windows the batch at hand holds; None means the first ones, and in a batch one that is left out."""

    def __call__(
        self, q: Tensor, k: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None
    ) -> tuple[dict[str, Tensor], int]:
        """Scaled and rotated queries (b, t, h, d) and keys (b, t, k, d) -> sums and the queries in them."""
        # `sinks` (h,) are logits that join the softmax.
        sampled = self.sampled(len(q))
        if len(places := list(sampled) or [0]) < len(q):
            q, k, mask = q[places], k[places], mask[places] if mask is not None and len(mask) > 1 else mask
        b, t = q.shape[:2]
        drawn = torch.stack([self.positions(sampled.get(place, 0), t) for place in places])  # (b, q), on the host
        positions = drawn.to(q.device)
        queries = q[torch.arange(b, device=q.device).unsqueeze(-1), positions]  # (b, q, h, d)
        hidden = _hidden(positions, t, mask)
        # A row is one key head of one window; of each of its queries there are products of all channels.
        row, most = queries[0].numel() // k.shape[2] * max(t // k.shape[3], k.shape[3]), MOST_NUMBERS[q.device.type]
        rows = min(b * k.shape[2], max(1, most // row))
        at_once = max(1, rows // k.shape[2])  # windows
        total: dict[str, Tensor] = {}
        for start in range(0, b, at_once):
            some = slice(start, start + at_once)
            step = min(-(-t // STRETCHES), max(1, most // (rows * k.shape[3] ** 2)))
            stretches = _stretches(drawn[some], t, step=step, sinks=sinks is not None)
            found = self._windows(
                queries[some], k[some], positions[some], hidden[some], sinks, stretches, heads_at_once=rows
            )
            for name, value in found.items():
                total[name] = total[name] + value if name in total else value
        if not sampled:  # the sums of no queries: those of other processes are added to them by their names
            return {name: torch.zeros_like(value) for name, value in total.items()}, 0
        return total, positions.numel()

    def sampled(self, windows: int) -> dict[int, int]:
        """Windows of the batch at hand that are sampled, by place."""
        numbers = range(windows) if self.numbers is None else self.numbers
        return {at: number for at, number in enumerate(numbers) if number is not None and number % self.every == 0}

    def positions(self, number: int, tokens: int) -> Tensor:
        """The queries (q,) of a window; the first tokens have nothing to choose between."""
        generator = torch.Generator().manual_seed(self.seed * WINDOWS_APART + number)
        count = min(self.per_window, tokens)
        return torch.randint(tokens // 8, tokens, (count,), generator=generator).sort().values

    def _windows(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        hidden: Tensor,
        sinks: Tensor | None,
        stretches: Sequence[tuple[slice, int]],
        *,
        heads_at_once: int,
    ) -> dict[str, Tensor]:
        """(b, q, h, d), (b, t, k, d) -> sums over these windows; a sink is one more key, of zeros."""
        b, _, heads, _ = k.shape
        q = q.unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4).float()  # (b, k, g, q, d)
        k = k.transpose(1, 2).float()  # (b, k, t, d)
        parts: dict[str, list[Tensor]] = {}
        for start in range(0, heads, heads_at_once):
            some = slice(start, start + heads_at_once)
            query, key = q[:, some], k[:, some]
            seen = (query.flatten(2, 3) @ key.mT).unflatten(2, query.shape[2:4])  # (b, k, g, q, t)
            seen = softcapped(seen, self.softcap)
            weights = _weights(
                seen, hidden[:, None, None], None if sinks is None else sinks.unflatten(0, (heads, -1))[some]
            )
            key = key if sinks is None else nn.functional.pad(key, (0, 0, 0, 1))
            count = key.shape[1]
            seen = SampledQueries(
                heads=torch.arange(heads, device=k.device)[some].repeat(b),
                query=query.flatten(0, 1),
                key=key.flatten(0, 1),
                weights=weights.flatten(0, 1),
                positions=positions.repeat_interleave(count, dim=0),
                stretches=stretches,
            )
            for reading in self.readings:
                for name, value in reading(seen).items():
                    parts.setdefault(name, []).append(value.unflatten(0, (b, -1)).sum(dim=0))
        return {name: torch.cat(values) for name, values in parts.items()}


def _stretches(positions: Tensor, tokens: int, *, step: int, sinks: bool) -> list[tuple[slice, int]]:
    """So many keys at a time, with the first of the queries (b, q) that sees any; a sink is one more, for all."""
    found = []
    for start in range(0, tokens, step):
        first = int((positions < start).all(dim=0).sum())  # positions ascend
        found.append((slice(start, min(start + step, tokens)), first))
    return [*found, (slice(tokens, tokens + 1), 0)] if sinks else found


def _weights(scores: Tensor, unseen: Tensor, sinks: Tensor | None) -> Tensor:
    """Attention (b, k, g, q, t), a little of it to all visible keys alike; sinks (k, g) have a column behind."""
    anywhere = (~unseen).to(scores.dtype) / (~unseen).sum(dim=-1, keepdim=True)
    scores = scores.masked_fill(unseen, float("-inf"))
    if sinks is not None:
        own = sinks.to(scores.dtype)[None, :, :, None, None].expand(*scores.shape[:-1], 1)
        scores, anywhere = torch.cat([scores, own], dim=-1), nn.functional.pad(anywhere, (0, 1))
    return scores.softmax(dim=-1).lerp(anywhere, AWAKE)


def _hidden(positions: Tensor, tokens: int, mask: Tensor | None) -> Tensor:
    """What the sampled queries (b, q) may not look at, (b, q, t); the model's mask is (b or 1, 1, t, t)."""
    hidden = torch.arange(tokens, device=positions.device) > positions.unsqueeze(-1)
    if mask is None:
        return hidden
    windows = torch.arange(len(positions), device=positions.device).clamp(max=len(mask) - 1)
    rows = mask[windows.unsqueeze(-1), 0, positions][..., :tokens]
    return hidden | (~rows if rows.dtype == torch.bool else rows < -1e4)


@dataclass(frozen=True)
class PairGrams:
    """Gram (h, 2P, 2P) of every pair's share s of the score and of its quadrature t, [s | t]."""

    num_pairs: int

    def __call__(self, seen: SampledQueries) -> dict[str, Tensor]:
        gram = pair_gram(as_complex(seen.query, self.num_pairs), *seen.covariances(self.num_pairs))
        return {"scores": gram.flatten(0, 1).double()}


@dataclass(frozen=True)
class KeyCovariances:
    """Covariance (k, P, P) of the keys' pairs as complex numbers, in the frame of the query that looks.

    Relative to the query, near keys hardly turn; in absolute positions the slow pairs would seem unrelated.
    """

    rates: Tensor  # (k, P)

    def __call__(self, seen: SampledQueries) -> dict[str, Tensor]:
        P, theta = self.rates.shape[-1], self.rates[seen.heads]  # (r, P)
        a, b = lower(P, theta.device)
        # The query heads of a key head look at the same keys: only their sum is asked for.
        cov = seen.covariances(P)[0].sum(dim=2)  # (r, m, q)
        frame = phases((theta[:, a] - theta[:, b]).unsqueeze(-1), seen.positions.unsqueeze(1))
        found = (cov * frame).sum(dim=-1)  # (r, m)
        whole = found.new_zeros(len(found), P, P)
        whole[:, b, a], whole[:, a, b] = found.conj(), found
        return {"keys": whole.to(torch.complex128)}


@dataclass(frozen=True)
class SlotGrams:
    """For each set of slots the Gram (h, 2p, 2p) of [s | t], and its product with what all pairs score.

    Channels that do not rotate have maps of their own, so their share of the score is not the slots' to fit.
    """

    slots: Sequence[Slots]
    rates: Tensor  # (k, P) of the pairs the slots stand in for

    def __call__(self, seen: SampledQueries) -> dict[str, Tensor]:
        rotated = 2 * self.rates.shape[-1]
        scores = seen.query[..., :rotated] @ seen.key[..., :rotated].mT.unsqueeze(1)  # (r, g, q, t)
        mean = (seen.weights * scores).sum(dim=-1, keepdim=True)
        centred = seen.weights * (scores - mean)  # nothing where the weight is nothing
        energy = (centred * (scores - mean)).sum(dim=(-2, -1)).flatten().double()  # (r g,)
        found = {}
        for number, slots in enumerate(self.slots):
            query, key = self._turned_to(slots, seen)
            summed = (centred.flatten(1, 2) @ key).unflatten(1, query.shape[1:3])  # (r, g, q, 2p)
            cross = (query.conj() * as_complex(summed, query.shape[-1])).sum(dim=2)
            gram = pair_gram(query, *covariances(key, seen.weights, seen.stretches))
            found[f"slots{number}_gram"] = gram.flatten(0, 1).double()
            found[f"slots{number}_cross"] = torch.cat([cross.real, cross.imag], dim=-1).flatten(0, 1).double()
            found[f"slots{number}_energy"] = energy
        return found

    def _turned_to(self, slots: Slots, seen: SampledQueries) -> tuple[Tensor, Tensor]:
        """Queries (r, g, q, p), as complex numbers, and keys (r, t, 2p) in the slots, turned at the slots' rates."""
        P, heads = self.rates.shape[-1], seen.heads
        times = torch.arange(seen.key.shape[1], device=seen.key.device).unsqueeze(0)  # (1, t)

        def through(x: Tensor, maps: Tensor, at: Tensor) -> Tensor:
            """(r, n, d) at times (r or 1, n) -> (r, n, p)."""
            still = as_complex(x, P) * phases(-self.rates[heads].unsqueeze(1), at.unsqueeze(-1))
            moved = still @ maps[heads].to(still.dtype)
            return moved * phases(slots.rates[heads].unsqueeze(1), at.unsqueeze(-1))

        g = seen.query.shape[1]
        query = through(seen.query.flatten(1, 2), slots.q_map, seen.positions.repeat(1, g)).unflatten(1, (g, -1))
        key = through(seen.key, slots.k_map, times)
        return query, torch.cat([key.real, key.imag], dim=-1)


def covariances(key: Tensor, weights: Tensor, stretches: Sequence[tuple[slice, int]]) -> tuple[Tensor, Tensor]:
    """Of pairs z = k1 + i k2 of keys (r, t, 2p) as every query weighs them: cov(z_a*, z_b) and cov(z_a, z_b).

    Both (r, m, g, q), of the pairs a >= b: the others are the same numbers again.
    """
    p, shape = key.shape[-1] // 2, weights.shape[1:3]
    a, b = lower(p, key.device)
    left, right = torch.cat([a, a + p, a, a + p]), torch.cat([b, b + p, b + p, b])
    x = (key - key.mean(dim=1, keepdim=True)).mT.contiguous()  # a shift that no covariance sees, and that saves digits
    means = x @ weights.flatten(1, 2).mT  # (r, 2p, g q)
    # Products of channels once per key: every query then is a column of one matrix product.
    cov = (means.index_select(1, left) * means.index_select(1, right)).neg_().unflatten(2, shape)  # (r, 4m, g, q)
    for keys, first in stretches:
        some = x[:, :, keys]
        products = some.index_select(1, left) * some.index_select(1, right)  # (r, 4m, keys)
        some = weights[:, :, first:, keys]
        cov[..., first:] += (products @ some.flatten(1, 2).mT).unflatten(2, some.shape[1:3])
    real, imag, one, other = cov.chunk(4, dim=1)
    return torch.complex(real + imag, one - other), torch.complex(real - imag, one + other)


def pair_gram(query: Tensor, turning: Tensor, still: Tensor) -> Tensor:
    """Gram (r, g, 2p, 2p) of [s | t] over queries (r, g, q, p), from `covariances` of their keys."""
    # For pairs as complex numbers s + i t = q* z, so that products of s and t are parts of those of q* z.
    p = query.shape[-1]
    a, b = lower(p, query.device)
    query = query.movedim(-1, 1).contiguous()  # (r, p, g, q)
    x, y = query.index_select(1, a), query.index_select(1, b)
    turning = (x * y.conj()).mul_(turning).sum(dim=-1).mT  # (r, g, m)
    still = (x * y).conj().mul(still).sum(dim=-1).mT
    both, apart = (still + turning) / 2, (still - turning) / 2
    gram = both.real.new_zeros(*both.shape[:2], 2, p, 2, p)
    parts = (0, 0, both.real, both.real), (1, 1, -apart.real, -apart.real), (0, 1, both.imag, apart.imag)
    for i, j, found, turned in parts:
        gram[:, :, i, b, j, a], gram[:, :, i, a, j, b] = turned, found
    gram[:, :, 1, :, 0] = gram[:, :, 0, :, 1].mT
    return gram.flatten(4).flatten(2, 3)


def lower(p: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices (m,), (m,) of the pairs a >= b."""
    a, b = torch.tril_indices(p, p, device=device)
    return a, b


def as_complex(x: Tensor, num_pairs: int) -> Tensor:
    """(..., d) -> (..., P): the pairs as complex numbers."""
    return torch.complex(x[..., :num_pairs], x[..., num_pairs : 2 * num_pairs])


def phases(rates: Tensor, positions: Tensor) -> Tensor:
    """exp(i rate position), the angle in float64: a long text turns a fast pair thousands of times."""
    angles = rates.double() * positions.double()
    return torch.complex(angles.cos().float(), angles.sin().float())
