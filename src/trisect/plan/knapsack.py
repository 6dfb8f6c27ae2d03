"""The multiple-choice knapsack: one choice per item, least loss, within a budget.      [math.md A-1, A-3]"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

TABLE = 1 << 15
"""Most columns of the dynamic programme; finer costs are rounded up to this many units."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One width that an item may take, what it costs, and what it loses."""

    width: int
    cost: int
    loss: float


C = TypeVar("C", bound=Choice)


def least_cost(items: Sequence[Sequence[Choice]]) -> int:
    """The cost of the cheapest choices."""
    return sum(min(choice.cost for choice in item) for item in items)


def smallest_step(items: Sequence[Sequence[Choice]]) -> int:
    """The least that a step from one choice to a narrower one saves."""
    steps = [wide.cost - narrow.cost for item in items for narrow, wide in zip(item, item[1:], strict=False)]
    return min((step for step in steps if step > 0), default=0)


def spend(items: Sequence[Sequence[C]], *, budget: int, at_least: bool = False, table: int = TABLE) -> list[C]:
    """The best choices for a budget of at least `least_cost`, met to one step: from below, or `at_least`."""
    picked = knapsack(items, budget=budget, table=table)
    assert picked is not None, "the reach was checked"
    return settled(items, picked, budget=budget, at_least=at_least)


def knapsack(items: Sequence[Sequence[C]], *, budget: int, table: int = TABLE) -> list[C] | None:
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


def settled(items: Sequence[Sequence[C]], picked: Sequence[C], *, budget: int, at_least: bool = False) -> list[C]:
    """Widen while the budget lasts: what most loss is won with per cost, then what was cut deepest.

    Items are in order of width and no loss rises with it. Flat curves and rounded costs leave something over;
    after this, less than the next step of any item is left. Where the budget is to be kept (`at_least`), one
    of these steps is taken as well, and others go back for it as long as no more is lost than without it.
    """
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
