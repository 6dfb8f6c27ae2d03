"""Ranks of single linear maps: one ratio for all, or as the baselines' papers spread it over a model.

docs/math.md, L-4 and L-10 to L-12. A ratio is what is removed, a share what is kept.
"""

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from trisect.errors import TrisectError

Key = tuple[int, str]  # (layer, name of the linear map)

Size = tuple[int, int, int]  # (inputs, outputs, heads)

Rule = Callable[[int, int, int, float], int]  # (inputs, outputs, heads, ratio) -> rank: what a ratio means to a method

Curve = Mapping[float, float]
"""Share of its parameters one linear map keeps -> perplexity of the model with only that map cut."""

MOST_REMOVED = 0.95  # no linear map is cut by more than this on account of its small loss, unless all of them are

SMALLEST_LOSS = math.e
"""Below this, 1 / log(loss) grows without bound and then turns negative; smaller losses count as this."""

Item = TypeVar("Item")


def ranks_at(sizes: Mapping[Key, Size], rule: Rule, ratios: Mapping[Key, float], align: int | None) -> dict[Key, int]:
    """A ratio of its own for every linear map."""
    return {key: aligned(rule(*size, ratios[key]), most=rule(*size, 0.0), align=align) for key, size in sizes.items()}


def aligned(rank: int, *, most: int, align: int | None) -> int:
    """The nearest multiple of `align`, ties down, from one step up to the last one within `most`."""
    # Where not even one step fits, there is nothing to align to and the rank stays.
    if align is None or most < align:
        return min(rank, most)
    below = rank // align * align
    nearest = below if rank - below <= below + align - rank else below + align
    return max(align, min(nearest, most // align * align))


def truncation_loss(mean_square: float, *, tokens: int) -> float:
    """|X W - X W'|_F over all calibration tokens, the unit of SVD-LLM V2, from a loss per token."""
    return math.sqrt(mean_square * tokens)


def loss_ratios(losses: Mapping[Key, float], ratio: float) -> dict[Key, float]:
    """SVD-LLM V2: linear maps of one type are cut in proportion to 1 / log(loss).           [math.md L-10]

    `losses` are Frobenius norms over all calibration tokens at the common ratio (`truncation_loss`). The mean
    over each type is `ratio`.
    """
    ratios: dict[Key, float] = {}
    for kind in {name for _, name in losses}:
        weights = {key: 1 / math.log(max(loss, SMALLEST_LOSS)) for key, loss in losses.items() if key[1] == kind}
        ratios |= spread(weights, mean=ratio, most=max(MOST_REMOVED, ratio))
    return {key: ratios[key] for key in losses}


def fisher_ratios(fisher: Mapping[Key, float], ratio: float) -> dict[Key, float]:
    """Palu: ranks in proportion to Fisher information, over all keys and values together.   [math.md L-11]

    Full ranks are taken as equal, as keys and values of one model are. The mean over all is `ratio`.
    """
    return {key: 1 - share for key, share in spread(fisher, mean=1 - ratio, most=1.0).items()}


def spread(weights: Mapping[Item, float], *, mean: float, most: float) -> dict[Item, float]:
    """Shares in proportion to `weights`, none above `most`, with this mean (not above `most` either)."""
    # What a full share has no room for goes to the others, again in proportion.
    shares: dict[Item, float] = {}
    rest, left = dict(weights), mean * len(weights)
    while rest:
        total = sum(rest.values())
        # Where nothing is left to tell the rest apart, they are alike.
        portions = {key: weight / total if total > 0 else 1 / len(rest) for key, weight in rest.items()}
        full = [key for key, portion in portions.items() if left * portion > most]
        if not full:
            shares |= {key: left * portion for key, portion in portions.items()}
            break
        for key in full:
            shares[key] = most
            del rest[key]
        left = max(0.0, left - most * len(full))
    return {key: shares[key] for key in weights}


def sensitivity_ranks(
    curves: Mapping[Key, Curve], sizes: Mapping[Key, Size], rule: Rule, ratio: float
) -> dict[Key, int]:
    """ASVD's STRS: every cut whose own perplexity is below one threshold, the lowest.       [math.md L-12]"""
    # Every linear map takes the deepest of its cuts below the threshold, or stays whole (its full rank) if it
    # has none. The result never has more parameters than the ratio allows.
    budget = math.floor((1 - ratio) * sum(inputs * outputs for inputs, outputs, _ in sizes.values()))
    # Every cut of every curve, the most harmful first; a model that broke down is worse than any other.
    known = ((key, share, perplexity) for key, curve in curves.items() for share, perplexity in curve.items())
    harm = [(-math.inf if math.isnan(perplexity) else -perplexity, key, share) for key, share, perplexity in known]
    cuts = [(key, share) for _, key, share in sorted(harm) if share < 1]

    def ranks(harmful: int) -> dict[Key, int]:
        """With the `harmful` most sensitive cuts forbidden."""
        shares = dict.fromkeys(sizes, 1.0)
        for key, share in cuts[harmful:]:
            shares[key] = min(shares[key], share)
        whole = {key: min(sizes[key][:2]) for key in shares}
        return {key: whole[key] if share >= 1 else rule(*sizes[key], 1 - share) for key, share in shares.items()}

    low, high = 0, len(cuts)  # forbidding more never makes a model smaller, so bisection finds the most
    while low < high:
        middle = (low + high + 1) // 2
        if _parameters(ranks(middle), sizes) <= budget:
            low = middle
        else:
            high = middle - 1
    found = ranks(low)
    if _parameters(found, sizes) > budget:
        raise TrisectError(
            f"A ratio of {ratio:g} is beyond the measured sensitivities; use less, or --allocate uniform."
        )
    return found


def _parameters(ranks: Mapping[Key, int], sizes: Mapping[Key, Size]) -> int:
    """Of factored maps; one at its full rank is not factored."""
    total = 0
    for key, rank in ranks.items():
        inputs, outputs, _ = sizes[key]
        total += inputs * outputs if rank >= min(inputs, outputs) else rank * (inputs + outputs)
    return total
