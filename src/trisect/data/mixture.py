"""Mixtures of sources: `slimpajama:0.5+ptb:0.5`, `wikitext2+notes.txt`."""

import math
from dataclasses import dataclass
from pathlib import Path

from trisect.errors import TrisectError


@dataclass(frozen=True, kw_only=True)
class Ingredient:
    """One source of a mixture and its share of the windows."""

    source: str
    share: float
    """Shares of a mixture sum to 1."""


def parse_mixture(text: str) -> list[Ingredient]:
    """Read `a:weight+b:weight`. Weights are relative; without any, all sources weigh the same.

    An existing path is taken as it is, so that file names may hold + and : themselves.
    """
    if Path(text).is_file():
        return [Ingredient(source=text, share=1.0)]
    parts = [_parse_part(part, mixture=text) for part in text.split("+")]
    given = [weight for _, weight in parts if weight is not None]
    if given and len(given) < len(parts):
        missing = ", ".join(source for source, weight in parts if weight is None)
        raise TrisectError(
            f"The mixture {text!r} gives some weights and none for {missing}: weigh every source, "
            "as in slimpajama:0.5+ptb:0.5, or none."
        )
    weights = [1.0 if weight is None else weight for _, weight in parts]
    total = sum(weights)
    return [
        Ingredient(source=source, share=weight / total)
        for (source, _), weight in zip(parts, weights, strict=True)
    ]


def count_windows(shares: list[float], *, samples: int) -> list[int]:
    """Split `samples` by shares that sum to 1: largest remainders get what rounding down leaves."""
    exact = [share * samples for share in shares]
    counts = [math.floor(quota) for quota in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for index in by_remainder[: samples - sum(counts)]:
        counts[index] += 1
    return counts


def _parse_part(part: str, *, mixture: str) -> tuple[str, float | None]:
    name, colon, tail = part.strip().rpartition(":")
    if not colon or Path(part.strip()).is_file():
        name, weight = part.strip(), None
    else:
        weight = _parse_weight(tail, part=part, mixture=mixture)
        name = name.strip()
    if not name:
        raise TrisectError(
            f"The mixture {mixture!r} has an empty source: write it as slimpajama:0.5+ptb:0.5."
        )
    return name, weight


def _parse_weight(tail: str, *, part: str, mixture: str) -> float:
    try:
        weight = float(tail)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise TrisectError(
            f"{part.strip()!r} in {mixture!r} is neither a file nor a source with a weight: "
            "weights are numbers above 0, as in slimpajama:0.5+ptb:0.5."
        )
    return weight
