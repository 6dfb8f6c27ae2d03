"""The uniform plan: the same share off every chosen component of every chosen layer.          [math.md A-4]

Where one width for all layers cannot meet the budget, some layers have the next width on the grid.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trisect.config import Share
from trisect.plan.costs import Costs
from trisect.plan.problem import Grid, Key, Planner, Problem, pose
from trisect.records.plan import Plan
from trisect.records.shapes import ModelShape

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
    return [(tuple(keys),) for keys in tied.values()] + [tuple((key,) for key in keys) for keys in single.values()]


def _span(problem: Problem, keys: tuple[Key, ...]) -> tuple[Grid, int]:
    """The widths that keys of one grid may all have."""
    return problem.grid(keys[0]), max(map(problem.lowest, keys))


def _group(problem: Problem, units: list[Unit]) -> Group:
    grid, lowest = _span(problem, units[0][0])
    widths = (grid.width, *range((grid.width - 1) // grid.step * grid.step, lowest - 1, -grid.step))
    costs = tuple(tuple(problem.cost(dict.fromkeys(keys, width)) for width in widths) for keys in units[0])
    return Group(units=tuple(units), widths=widths, costs=costs)


BISECTIONS = 40
"""Enough that no width of any model lies between the last two shares."""


def uniform_plan(
    shape: ModelShape,
    *,
    ratio: float,
    parts: Sequence[str],
    layers: Sequence[int] | None,
    align: int | None,
    method: str = "a3",
) -> Plan:
    """Widths of (1 - ratio) d in each of `parts`, on the grid; `layers` None means every layer."""
    costs, goal = Costs(shape=shape, unit="linear"), Share(budget="params", removed=ratio)
    problem = pose(costs, goal=goal, parts=parts, layers=layers, align=align, method=method)
    return uniform_planner(problem).solve(problem)


def uniform_planner(problem: Problem) -> Planner:
    """The largest common share that fits, then single steps until no other one does."""
    groups = groups_of(problem)
    smallest = min((group.smallest for group in groups if group.smallest), default=0)

    def at(budget: int) -> Plan:
        widths = _common(problem, budget, smallest)
        if widths is None:
            steps = _single_steps(problem, groups, _largest_share(problem, groups, budget), budget)
            pairs = zip(groups, steps, strict=True)
            widths = {key: width for group, count in pairs for key, width in group.spread(count)}
        return problem.plan(widths)

    return Planner(least=sum(group.cost(group.last) for group in groups), smallest=smallest, at=at, curved=False)


def _common(problem: Problem, budget: int, smallest: int) -> dict[Key, int] | None:
    """The nearest widths, one for all layers, where they meet the budget to a step: the paper's rule.

    Exact ranks are the paper's whatever they come to: rounding moves each by less than two channels.
    """
    if not isinstance(problem.goal, Share):
        return None
    widths = {key: problem.grid(key).width_at(problem.goal.removed) for key in problem.keys}
    if any(width < problem.lowest(key) for key, width in widths.items()):
        return None
    if problem.align is None and problem.goal.budget == "params":
        return widths
    return widths if budget <= problem.cost(widths) < budget + smallest else None


def _largest_share(problem: Problem, groups: Sequence[Group], budget: int) -> list[int]:
    """Steps of every group to the common share that uses most of the budget.

    Where the budget is to be kept, shares fall towards it from above; where it is a limit, they rise.
    """
    fitting, beyond = (1.0, 0.0) if problem.at_least else (0.0, 1.0)
    for _ in range(BISECTIONS):
        middle = (fitting + beyond) / 2
        steps = [round(group.steps_at(middle)) for group in groups]
        if problem.fits(sum(map(Group.cost, groups, steps)), budget):
            fitting = middle
        else:
            beyond = middle
    return [round(group.steps_at(fitting)) for group in groups]


def _single_steps(problem: Problem, groups: Sequence[Group], start: list[int], budget: int) -> list[int]:
    """One step after the other, of the group that is furthest from where the others are."""
    steps, onward = list(start), 1 if problem.at_least else -1
    cost = sum(map(Group.cost, groups, steps))
    while True:
        found: list[tuple[float, int, int]] = []
        for number, group in enumerate(groups):
            there = steps[number] + onward
            if not 0 <= there <= group.last:
                continue
            change = group.cost(there) - group.cost(steps[number])
            free = problem.at_least and change >= 0  # a cut that saves nothing is none to make
            if problem.fits(cost + change, budget) and not free:
                # The middle of a step decides, so that a group with large ones is not taken past its place.
                middle = group.share(steps[number]) + group.share(there)
                found.append((onward * middle, abs(change), -number))
        if not found:
            return steps
        number = -max(found)[2]
        cost -= groups[number].cost(steps[number])
        steps[number] += onward
        cost += groups[number].cost(steps[number])
