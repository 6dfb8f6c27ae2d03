"""Axes: from values to places between 0 and 1, and where the ticks go."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

STEPS = (1.0, 2.0, 5.0, 10.0)
LOG_RANGE = 20.0
"""An axis whose largest value is so many times its smallest is logarithmic where it may be."""

SAME = 1e-9
"""Values this close, by their own size, need no axis between them."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """From numbers to places on a picture."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def axis_for(values: Iterable[float], *, log: bool = False) -> Axis:
    """An axis that holds all values with some room; logarithmic only if asked for, needed and possible."""
    found = list(values)
    low, high = min(found), max(found)
    if log and low > 0 and high / low > LOG_RANGE:
        return _log_axis(low, high)
    if high - low <= SAME * max(abs(low), abs(high)):
        room = abs(low) / 2 or 0.5
        low, high = low - room, high + room
    step = tick_step(high - low)
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = tuple(float(f"{n * step:.12g}") for n in range(first, last + 1))
    return Axis(low=ticks[0], high=ticks[-1], ticks=ticks)


def tick_step(span: float, *, wanted: int = 5) -> float:
    """The smallest of 1, 2, 5 times a power of ten that needs no more than `wanted` steps."""
    power = 10.0 ** math.floor(math.log10(span / wanted))
    return next(power * step for step in STEPS if span / (power * step) <= wanted)


def _log_axis(low: float, high: float) -> Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    between = [step * 10.0**n for n in range(first, last + 1) for step in STEPS[:3]]
    start = max(tick for tick in between if tick <= low)
    end = min(tick for tick in between if tick >= high)
    # Many decades have room for whole ones only.
    chosen = between if last - first <= 3 else [10.0**n for n in range(first, last + 1)]
    ticks = tuple(tick for tick in chosen if start <= tick <= end)
    return Axis(low=start, high=end, ticks=ticks, log=True)
