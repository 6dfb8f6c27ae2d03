"""Components that are narrowed step by step, evenly over their layers.                       [math.md A-4]"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from trisect.plan.align import Grid
from trisect.plan.problem import Key, Problem

Unit = tuple[tuple[Key, ...], ...]
"""What one layer has in a group: keys that move at once, one such lot after the other."""
HEADS = ("qk", "ov")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Components of layers that are alike. A step takes one lot of keys of one unit to its next width.

    A number of steps says everything: every unit has taken its share of them, and those that have taken one
    more lie evenly among the others.
    """

    units: tuple[Unit, ...]
    """In the order of their layers."""
    widths: tuple[int, ...]
    """From the width now to the narrowest."""
    costs: tuple[tuple[int, ...], ...]
    """Of each lot of a unit, at each of the widths."""

    @property
    def last(self) -> int:
        """Steps until everything is at its narrowest."""
        return len(self.units) * len(self.costs) * (len(self.widths) - 1)

    @property
    def smallest(self) -> int:
        """What the smallest step saves that saves anything; 0 if none does."""
        steps = [a - b for costs in self.costs for a, b in zip(costs, costs[1:], strict=False)]
        return min((step for step in steps if step > 0), default=0)

    def cost(self, steps: int) -> int:
        return sum(costs[level] * count for costs, level, count in self._counts(steps))

    def share(self, steps: int) -> float:
        """The share of its width that the group keeps, on the mean."""
        total = sum(self.widths[level] * count for _, level, count in self._counts(steps))
        return total / (len(self.units) * len(self.costs) * self.widths[0])

    def steps_at(self, share: float) -> float:
        """The steps to a share on the mean: a fraction where it lies between two numbers of them."""
        target = max(share * self.widths[0], self.widths[-1])
        level = bisect_left(self.widths, -target, key=lambda width: -width)
        if level == 0:
            return 0.0
        above, below = self.widths[level - 1], self.widths[level]
        return len(self.units) * len(self.costs) * (level - 1 + (above - target) / (above - below))

    def spread(self, steps: int) -> Iterator[tuple[Key, int]]:
        """The width of every key. Narrow layers lie as the points of a drawn line: no end gets more of them.

        Heads and MLPs start at different points of it: where they can, layers that lose one keep the other.
        """
        level, whole, more = self._taken(steps)
        n, narrow = len(self.units), whole + (more > 0)
        phase = 3 if self.units[0][0][0][1] == "mlp" else 1
        marks = [(4 * narrow * index + phase * n) // (4 * n) for index in range(n + 1)]
        taken = 0
        for unit, before, after in zip(self.units, marks, marks[1:], strict=False):
            taken += after - before
            lots = len(unit) if after > before else 0
            if lots and more and taken == (narrow + 1) // 2:  # the one in the middle is half-way
                lots = more
            for number, keys in enumerate(unit):
                for key in keys:
                    yield key, self.widths[level + (number < lots)]

    def _taken(self, steps: int) -> tuple[int, int, int]:
        """Steps of every lot; units where all of them took one more; lots of another unit that did."""
        level, rest = divmod(steps, len(self.units) * len(self.costs))
        return level, *divmod(rest, len(self.costs))

    def _counts(self, steps: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Costs of a lot, a place in `widths`, and how many units have the lot there."""
        level, whole, more = self._taken(steps)
        for number, costs in enumerate(self.costs):
            narrow = whole + (number < more)
            yield costs, level, len(self.units) - narrow
            if narrow:
                yield costs, level + 1, narrow


def groups_of(problem: Problem) -> list[Group]:
    """The problem's keys by what they are, how wide, and what they cost."""
    alike: dict[tuple[object, ...], list[Unit]] = {}
    for unit in _units(problem):
        sort = [(keys[0][1], _span(problem, keys), problem.costs.full(*keys[0])) for keys in unit]
        alike.setdefault(tuple(sort), []).append(unit)
    return [_group(problem, units) for units in alike.values()]


def _units(problem: Problem) -> list[Unit]:
    """Tied keys all at once; heads of a layer side by side, since kernels want them equal; others alone."""
    tied: dict[tuple[object, ...], list[Key]] = {}
    single: dict[tuple[object, ...], list[Key]] = {}
    for key in problem.keys:
        parts = problem.moving_with(key[1])
        if parts:
            tied.setdefault((parts, problem.grid(key)), []).append(key)
        else:
            sort = "heads" if key[1] in HEADS else key[1]
            single.setdefault((key[0], sort, _span(problem, (key,))), []).append(key)
    return [(tuple(keys),) for keys in tied.values()] + [
        tuple((key,) for key in keys) for keys in single.values()
    ]


def _span(problem: Problem, keys: tuple[Key, ...]) -> tuple[Grid, int]:
    """The widths that keys of one grid may all have."""
    return problem.grid(keys[0]), max(map(problem.lowest, keys))


def _group(problem: Problem, units: list[Unit]) -> Group:
    grid, lowest = _span(problem, units[0][0])
    widths = (grid.width, *range((grid.width - 1) // grid.step * grid.step, lowest - 1, -grid.step))
    costs = tuple(tuple(problem.cost(dict.fromkeys(keys, width)) for width in widths) for keys in units[0])
    return Group(units=tuple(units), widths=widths, costs=costs)
