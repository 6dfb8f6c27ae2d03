"""Components that are narrowed step by step, evenly over their layers.                       [math.md A-4]"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from trisect.parts import COMPONENTS
from trisect.plan.problem import Key, Problem


@dataclass(frozen=True, kw_only=True)
class Group:
    """The same component of layers that are alike. A step takes one unit to its next width.

    A number of steps says everything: every unit has taken its share of them, and those that have taken one
    more lie evenly among the others.
    """

    units: tuple[tuple[Key, ...], ...]
    """In the order of their layers. Keys of one unit move together."""
    widths: tuple[int, ...]
    """From the width now to the narrowest."""
    costs: tuple[int, ...]
    """Of one unit at each of them."""

    @property
    def last(self) -> int:
        """Steps until everything is at its narrowest."""
        return len(self.units) * (len(self.widths) - 1)

    @property
    def savings(self) -> list[int]:
        """What each step of one unit saves."""
        return [wide - narrow for wide, narrow in zip(self.costs, self.costs[1:], strict=False)]

    def cost(self, steps: int) -> int:
        return sum(count * self.costs[level] for level, count in self._levels(steps))

    def share(self, steps: int) -> float:
        """The share of its width that the group keeps, on the mean over its units."""
        total = sum(count * self.widths[level] for level, count in self._levels(steps))
        return total / (len(self.units) * self.widths[0])

    def steps_at(self, share: float) -> float:
        """The steps to a share on the mean: a fraction where it lies between two numbers of them."""
        target = max(share * self.widths[0], self.widths[-1])
        level = bisect_left(self.widths, -target, key=lambda width: -width)
        if level == 0:
            return 0.0
        above, below = self.widths[level - 1], self.widths[level]
        return len(self.units) * (level - 1 + (above - target) / (above - below))

    def spread(self, steps: int) -> Iterator[tuple[Key, int]]:
        """The width of every key, as a line is drawn in whole points: no end gets more than the other.

        Components start at different points of it: where they can, layers that lose queries keep values.
        """
        n, phase = len(self.units), 2 * COMPONENTS.index(self.units[0][0][1]) + 1
        level, more = divmod(steps, n)
        for index, unit in enumerate(self.units):
            before, after = (
                (2 * len(COMPONENTS) * more * at + phase * n) // (2 * len(COMPONENTS) * n)
                for at in (index, index + 1)
            )
            for key in unit:
                yield key, self.widths[level + after - before]

    def _levels(self, steps: int) -> list[tuple[int, int]]:
        """Places in `widths`, and how many units stand there."""
        level, more = divmod(steps, len(self.units))
        return [(level, len(self.units) - more), *([(level + 1, more)] if more else [])]


def groups_of(problem: Problem) -> list[Group]:
    """The problem's keys by what they are, how wide, and what they cost."""
    alike: dict[tuple[object, ...], list[Key]] = {}
    for key in problem.keys:
        parts, grid = problem.moving_with(key[1]), problem.grid(key)
        if parts:
            sort: tuple[object, ...] = (parts, grid)
        else:
            sort = (key[1], grid, problem.lowest(key), problem.costs.full(*key))
        alike.setdefault(sort, []).append(key)
    return [_group(problem, keys) for keys in alike.values()]


def _group(problem: Problem, keys: list[Key]) -> Group:
    units = (tuple(keys),) if problem.moving_with(keys[0][1]) else tuple((key,) for key in keys)
    grid, lowest = problem.grid(keys[0]), max(map(problem.lowest, keys))
    widths = (grid.width, *range((grid.width - 1) // grid.step * grid.step, lowest - 1, -grid.step))
    return Group(
        units=units,
        widths=widths,
        costs=tuple(problem.cost(dict.fromkeys(units[0], width)) for width in widths),
    )
