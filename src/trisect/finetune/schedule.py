"""The learning rate as a function of the step alone, so that it needs no state of its own."""

import math


def rate_at(step: int, total: int, *, schedule: str, warmup: float) -> float:
    """Share of the full learning rate for a step, counted from 0: a linear rise, then down to almost 0."""
    rise = math.ceil(warmup * total)
    if step < rise:
        return (step + 1) / (rise + 1)
    left = 1 - (step - rise) / max(1, total - rise)  # 1 at the first step after the rise, 1/n at the last
    if schedule == "constant":
        return 1.0
    return left if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
