"""One set of rotation rates for a whole model, which is all that a stock checkpoint can say.

k = key heads, p = a head's pairs, n = slots of the stock head
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SAME = 3e-7
"""Relative distance within which two rates are one: two units in the last place of float32."""

NUDGES = range(-4, 5)


def common_slots(layers: Sequence[Tensor]) -> Tensor:
    """The fewest slots (n,), fastest first, in which every head of rates (k, p) finds its own.

    A head may turn several pairs at one rate (folded frequencies do), and then needs as many such slots.
    """
    kinds = _kinds(torch.cat([rates.flatten() for rates in layers]))
    most: Counter[int] = Counter()
    for rates in layers:
        for head in rates:
            most |= Counter(_kind_of(head, kinds))
    return torch.tensor([rate for kind, rate in enumerate(kinds) for _ in range(most[kind])]).double()


def places_in(rates: Tensor, slots: Tensor) -> Tensor | None:
    """Which slot each pair of `rates` (k, p) takes, (k, p); None where a head finds no room."""
    kinds = _kinds(torch.cat([rates.flatten(), slots]))
    free: dict[int, list[int]] = {}
    for place, kind in enumerate(_kind_of(slots, kinds)):
        free.setdefault(kind, []).append(place)
    found = []
    for head in rates:
        taken: Counter[int] = Counter()
        row = []
        for kind in _kind_of(head, kinds):
            if taken[kind] >= len(free.get(kind, [])):
                return None
            row.append(free[kind][taken[kind]])
            taken[kind] += 1
        found.append(row)
    return torch.tensor(found)


def padded(slots: Tensor, count: int) -> Tensor:
    """More slots, for pairs that are zero everywhere: any rate does, so the slowest is repeated."""
    return torch.cat([slots, slots[-1:].expand(count - len(slots))])


def stock_factors(rates: Tensor, base: float) -> list[float]:
    """Divisors f of the frequencies base^(-2j/2n), so that 1 / (f_j base^(2j/2n)) are the rates (n,).

    Stock code does this in float32; of the neighbouring factors, the one that comes nearest is taken.
    """
    n = len(rates)
    powers = base ** (torch.arange(0, 2 * n, 2, dtype=torch.int64).float() / (2 * n))
    exact = 1 / (rates.double() * powers.double())
    choices = torch.stack([exact * (1 + nudge * 2.0**-24) for nudge in NUDGES]).float()
    errors = (1.0 / (choices * powers) - rates.float()).abs()
    best: list[float] = choices.gather(0, errors.argmin(dim=0, keepdim=True))[0].tolist()
    return best


def listed_rope(factors: list[float], base: float, longest: int) -> dict[str, Any]:
    """Arbitrary frequencies, in the one kind of RoPE that lists a factor for each of them.

    Short and long factors are the same and the lengths are equal, so that nothing changes with the length of
    a text and no engine finds a scale to multiply attention with.
    """
    return {
        "rope_type": "longrope",
        "rope_theta": base,
        "short_factor": factors,
        "long_factor": list(factors),
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": longest,
    }


def _kinds(rates: Tensor) -> list[float]:
    """The distinct rates, fastest first."""
    kinds: list[float] = []
    for rate in rates.double().sort(descending=True).values.tolist():
        if not kinds or rate < kinds[-1] * (1 - SAME):
            kinds.append(rate)
    return kinds


def _kind_of(rates: Tensor, kinds: list[float]) -> list[int]:
    """The number of each rate's kind: the slowest that is not slower than it."""
    rising = torch.tensor(kinds[::-1]).double()
    found = torch.searchsorted(rising, rates.detach().double().cpu())
    return [len(kinds) - 1 - int(index) for index in found]
