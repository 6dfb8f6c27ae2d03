"""From a config to a plan: the knapsack, and the three ways of sharing out a budget.      [math.md A-1 to A-4]"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trisect.config import CompressConfig, Increase, Share
from trisect.errors import TrisectError
from trisect.plan.curves import Curves, predicted_within
from trisect.plan.problem import Grid, Key, Planner, Problem, grid_of, problem_for
from trisect.records.plan import Plan
from trisect.records.shapes import ModelShape

# The multiple-choice knapsack: one choice per item, least loss, within a budget.                  [math.md A-3]

TABLE = 1 << 15  # most columns of the dynamic programme; finer costs are rounded up to this many units


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Widths that an item, one component or all of a layer, may take; what they cost, and what they lose."""

    widths: tuple[tuple[Key, int], ...]
    cost: int
    loss: float


def smallest_step(costs: Iterable[Sequence[int]]) -> int:
    """The least that a step to a narrower width saves; costs come narrowest first."""
    steps = [wide - narrow for item in costs for narrow, wide in zip(item, item[1:], strict=False)]
    return min((step for step in steps if step > 0), default=0)


def spend(items: Sequence[Sequence[Choice]], *, budget: int, table: int = TABLE) -> list[Choice]:
    """The best choices for a budget that the cheapest ones fit, met to one step from below."""
    picked = knapsack(items, budget=budget, table=table)
    assert picked is not None, "the reach was checked"
    return settled(items, picked, budget=budget)


def knapsack(items: Sequence[Sequence[Choice]], *, budget: int, table: int = TABLE) -> list[Choice] | None:
    """One choice per item with the least total loss and total cost within the budget; None if none fits.

    Exact where the costs above each item's cheapest choice, in units of their greatest common divisor, fit
    the table. Otherwise they are rounded up to coarser units: never over the budget, and no worse than the
    best choices for a budget that is smaller by one unit per item, the unit being at most budget / table.
    """
    least = [min(choice.cost for choice in item) for item in items]
    spare = budget - sum(least)
    if spare < 0:
        return None
    extras = [[choice.cost - low for choice in item] for item, low in zip(items, least, strict=True)]
    exact = math.gcd(*(extra for item in extras for extra in item)) or 1
    unit = exact if spare // exact <= table else -(-spare // table)
    costs = [[-(-extra // unit) for extra in item] for item in extras]
    losses = [[choice.loss for choice in item] for item in items]
    numbers = _solve(costs, losses, size=spare // unit)
    return [item[number] for item, number in zip(items, numbers, strict=True)]


def _solve(costs: list[list[int]], losses: list[list[float]], *, size: int) -> list[int]:
    """The number of the choice for each item; every item has one that costs nothing."""
    best = np.full(size + 1, np.inf)  # least loss for exactly this many units
    best[0] = 0.0
    trail = []
    for item_costs, item_losses in zip(costs, losses, strict=True):
        step, used = np.full(size + 1, np.inf), np.zeros(size + 1, dtype=np.int16)
        for number, (cost, loss) in enumerate(zip(item_costs, item_losses, strict=True)):
            if cost <= size:
                total = best[: size + 1 - cost] + loss
                better = total < step[cost:]
                np.copyto(step[cost:], total, where=better)
                np.copyto(used[cost:], np.int16(number), where=better)
        best = step
        trail.append(used)
    spent = int(best.argmin())
    numbers: list[int] = []
    for item_costs, used in zip(reversed(costs), reversed(trail), strict=True):
        numbers.append(int(used[spent]))
        spent -= item_costs[numbers[-1]]
    return numbers[::-1]


def settled(
    items: Sequence[Sequence[Choice]], picked: Sequence[Choice], *, budget: int, at_least: bool = False
) -> list[Choice]:
    """Widen while the budget lasts: what most loss is won with per cost, then what was cut deepest."""
    # Items are in order of width and no loss rises with it. Flat curves and rounded costs leave something over; after
    # this, less than the next step of any item is left. Where the budget is to be kept (`at_least`), one of these
    # steps is taken as well, and others go back for it as long as no more is lost than without it.
    at = [list(item).index(choice) for item, choice in zip(items, picked, strict=True)]
    rest = budget - sum(choice.cost for choice in picked)

    def best(way: int, most: float) -> int | None:
        """The item to take one step wider (1) or narrower (-1), among steps that cost no more than `most`."""
        ranks = []
        for number, (item, here) in enumerate(zip(items, at, strict=True)):
            if not 0 <= here + way < len(item):
                continue
            narrow, wide = item[min(here, here + way)], item[max(here, here + way)]
            cost = wide.cost - narrow.cost
            if cost <= most and (way > 0 or cost > 0):
                price = (narrow.loss - wide.loss) / max(1, cost)
                ranks.append((way * price, -way * (here + way) / len(item), -number))
        return -max(ranks)[2] if ranks else None

    def move(number: int, way: int) -> int:
        at[number] += way
        return items[number][at[number] - way].cost - items[number][at[number]].cost

    def lost() -> float:
        return sum(item[here].loss for item, here in zip(items, at, strict=True))

    while (number := best(1, rest)) is not None:
        rest += move(number, 1)
    if at_least and rest > 0 and (number := best(1, math.inf)) is not None:
        most = lost()
        rest += move(number, 1)
        while (number := best(-1, -rest)) is not None:
            whole = all(here + 1 == len(item) for item, here in zip(items, at, strict=True))
            rest += move(number, -1)
            if lost() > most and not whole:  # something has to go, even where nothing cheap does
                move(number, 1)
                break
    return [item[here] for item, here in zip(items, at, strict=True)]


# Allocations from loss curves: a width for every component (balanced), or one ratio per layer (search).

FINEST_ALIGN = 8  # of exact ranks, which have no grid: widths between its points would only run slower
RATIO_STEP = 0.01


def curved_planner(problem: Problem, curves: Curves, *, by_layer: bool) -> Planner:
    """The least loss that any budget can buy, with the components of a layer apart or (`by_layer`) at one ratio."""
    curves.check(problem.shape, problem.keys)

    def choice(*widths: tuple[Key, int]) -> Choice:
        loss = sum(curves.loss_at(*key, width) for key, width in widths)
        return Choice(widths=widths, cost=problem.cost(dict(widths)), loss=loss)

    single = {key: [choice((key, width)) for width in _widths(problem, curves, key)] for key in problem.keys}
    items = list(single.values())
    if by_layer:
        layers = sorted({layer for layer, _ in problem.keys})
        items = [[choice(*widths) for widths in _layer_widths(problem, curves, layer)] for layer in layers]

    def at(budget: int) -> Plan:
        here = [choice(pair) for picked in spend(items, budget=budget) for pair in picked.widths]
        # Single components a step wider or narrower, until less than one of their steps is left.
        steps = [sorted({one, *single[one.widths[0][0]]}, key=lambda choice: choice.widths) for one in here]
        last = settled(steps, here, budget=budget, at_least=problem.at_least)
        return problem.plan(dict(pair for one in last for pair in one.widths))

    least = sum(min(choice.cost for choice in item) for item in items)
    smallest = smallest_step([choice.cost for choice in item] for item in single.values())
    return Planner(least=least, smallest=smallest, at=at)


def _widths(problem: Problem, curves: Curves, key: Key) -> list[int]:
    """Every width of a component's grid that its curve and the floors reach, and the width as it is."""
    grid = grid_of(problem.shape.layers[key[0]], key[1], align=problem.config.align or FINEST_ALIGN)
    first = max(grid.at_least(problem.config.floor_of(key[1])), grid.up(curves.floor(*key)))
    return [*range(first, grid.width, grid.step), grid.width]


def _layer_widths(problem: Problem, curves: Curves, layer: int) -> list[tuple[tuple[Key, int], ...]]:
    """The layer's uniform widths at every ratio, as far as curves, grid and floors reach; narrowest first."""
    grids = {key: problem.grid(key) for key in problem.keys if key[0] == layer}
    ends = {key: max(problem.lowest(key), grid.up(curves.floor(*key))) for key, grid in grids.items()}
    ratios = [step * RATIO_STEP for step in reversed(range(round(1 / RATIO_STEP)))]
    every = [tuple((key, max(ends[key], grid.width_at(ratio))) for key, grid in grids.items()) for ratio in ratios]
    return list(dict.fromkeys(every))


def plan_for(shape: ModelShape, config: CompressConfig, curves: Curves | None = None) -> Plan:
    """The widths a config asks for; under a bound on perplexity, the fewest that the curves predict to keep it."""
    problem = problem_for(shape, config)
    planner = planner_for(problem, config.allocate, curves)
    if isinstance(config.goal, Increase):
        if curves is None:
            measured = "name their file with --curves FILE, and --allocate balanced to have one measured"
            raise TrisectError(f"Only loss curves can predict perplexity: {measured}.")
        return predicted_within(problem, planner, curves)
    problem.check_reach(planner.least)
    plan = planner.at(problem.budget)
    problem.check_removal(plan, planner.smallest)
    return plan


def planner_for(problem: Problem, allocate: str | None, curves: Curves | None = None) -> Planner:
    """One way of sharing out a budget, by name; one that was not named is the uniform one."""
    if allocate in (None, "uniform"):
        return uniform_planner(problem)
    if curves is None:
        new = "one that does not exist yet is measured and written"
        raise TrisectError(f"--allocate {allocate} needs loss curves: name their file with --curves FILE; {new}.")
    return curved_planner(problem, curves, by_layer=allocate == "search")


# The uniform plan: the same share off every component. Where one width for all layers cannot meet the budget,
# some layers have the next width on the grid.                                                     [math.md A-4]

Unit = tuple[tuple[Key, ...], ...]
"""What one layer has in a group: keys that move at once, one such lot after the other."""
HEADS = ("qk", "ov")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Components of layers that are alike. A step takes one lot of keys of one unit to its next width.

    A number of steps says everything: every unit has taken its share of them, and those that have taken one
    more lie evenly among the others.
    """

    problem: Problem
    units: tuple[Unit, ...]  # in the order of their layers
    widths: tuple[int, ...]  # from the width now to the narrowest

    @property
    def lots(self) -> int:
        """Lots of keys in all units: steps that take the group from one width to the next."""
        return len(self.units) * len(self.units[0])

    @property
    def last(self) -> int:
        """Steps until everything is at its narrowest."""
        return self.lots * (len(self.widths) - 1)

    def cost(self, steps: int) -> int:
        return self.problem.cost(dict(self.spread(steps)))

    def share(self, steps: int) -> float:
        """The share of its width that the group keeps, on the mean."""
        widths = [width for _, width in self.spread(steps)]
        return sum(widths) / (len(widths) * self.widths[0])

    def steps_at(self, share: float) -> float:
        """The steps to a share on the mean: a fraction where it lies between two numbers of them."""
        target = max(share * self.widths[0], self.widths[-1])
        level = bisect_left(self.widths, -target, key=lambda width: -width)
        if level == 0:
            return 0.0
        above, below = self.widths[level - 1], self.widths[level]
        return self.lots * (level - 1 + (above - target) / (above - below))

    def spread(self, steps: int) -> Iterator[tuple[Key, int]]:
        """The width of every key. Narrow layers lie as the points of a drawn line: no end gets more of them."""
        # Heads and MLPs start at different points of it: where they can, layers that lose one keep the other.
        # `whole` units have all their lots one width further, `more` lots of one other unit have, too.
        level, rest = divmod(steps, self.lots)
        whole, more = divmod(rest, len(self.units[0]))
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


def groups_of(problem: Problem) -> list[Group]:
    """The problem's keys by what they are, how wide, and what they cost."""
    alike: dict[tuple[object, ...], list[Unit]] = {}
    for unit in _units(problem):
        sort = [(keys[0][1], _span(problem, keys), problem.costs.full(*keys[0])) for keys in unit]
        alike.setdefault(tuple(sort), []).append(unit)
    groups = []
    for units in alike.values():
        grid, lowest = _span(problem, units[0][0])
        widths = (grid.width, *range((grid.width - 1) // grid.step * grid.step, lowest - 1, -grid.step))
        groups.append(Group(problem=problem, units=tuple(units), widths=widths))
    return groups


def _units(problem: Problem) -> list[Unit]:
    """Tied keys all at once; heads of a layer side by side, since kernels want them equal; others alone."""
    tied: dict[tuple[object, ...], list[Key]] = {}
    single: dict[tuple[object, ...], list[Key]] = {}
    for key in problem.keys:
        parts = next((parts for parts in problem.tied if key[1] in parts), ())
        if parts:
            tied.setdefault((parts, problem.grid(key)), []).append(key)
        else:
            sort = "heads" if key[1] in HEADS else key[1]
            single.setdefault((key[0], sort, _span(problem, (key,))), []).append(key)
    return [(tuple(keys),) for keys in tied.values()] + [tuple((key,) for key in keys) for keys in single.values()]


def _span(problem: Problem, keys: tuple[Key, ...]) -> tuple[Grid, int]:
    """The widths that keys of one grid may all have."""
    return problem.grid(keys[0]), max(map(problem.lowest, keys))


BISECTIONS = 40  # enough that no width of any model lies between the last two shares


def uniform_planner(problem: Problem) -> Planner:
    """The largest common share that fits, then single steps until no other one does."""
    groups = groups_of(problem)
    smallest = smallest_step(
        [problem.cost(dict.fromkeys(keys, width)) for width in group.widths[::-1]]
        for group in groups
        for keys in group.units[0]
    )

    def at(budget: int) -> Plan:
        widths = _common(problem, budget, smallest)
        if widths is None:
            steps = _single_steps(problem, groups, _largest_share(problem, groups, budget), budget)
            pairs = zip(groups, steps, strict=True)
            widths = {key: width for group, count in pairs for key, width in group.spread(count)}
        return problem.plan(widths)

    return Planner(least=sum(group.cost(group.last) for group in groups), smallest=smallest, at=at)


def _common(problem: Problem, budget: int, smallest: int) -> dict[Key, int] | None:
    """The nearest widths, one for all layers, where they meet the budget to a step: the paper's rule."""
    # Exact ranks are the paper's whatever they come to: rounding moves each by less than two channels. Experts have a
    # grid all the same.
    if not isinstance(problem.config.goal, Share):
        return None
    widths = {key: problem.grid(key).width_at(problem.config.goal.removed) for key in problem.keys}
    if any(width < problem.lowest(key) for key, width in widths.items()):
        return None
    mixed = any(problem.shape.layers[layer].experts for layer, _ in problem.keys)
    if problem.config.align is None and problem.config.goal.budget == "params" and not mixed:
        return widths
    return widths if budget <= problem.cost(widths) < budget + smallest else None


def _largest_share(problem: Problem, groups: Sequence[Group], budget: int) -> list[int]:
    """Steps of every group to the common share that uses most of the budget."""
    # Where the budget is to be kept, shares fall towards it from above; where it is a limit, they rise.
    fitting, beyond = (1.0, 0.0) if problem.at_least else (0.0, 1.0)
    for _ in range(BISECTIONS):
        middle = (fitting + beyond) / 2
        steps = [round(group.steps_at(middle)) for group in groups]
        fits = problem.fits(sum(map(Group.cost, groups, steps)), budget)
        fitting, beyond = (middle, beyond) if fits else (fitting, middle)
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
