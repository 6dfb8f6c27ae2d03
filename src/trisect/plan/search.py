"""The search: one ratio per decoder layer, shared by its components.                          [math.md A-4]

The paper has "a simple search over rank allocations for each decoder layer" and says no more. Here a layer
may lose any share in steps of RATIO_STEP, all its components alike, to the nearest widths; its loss is the
sum of its components' curves; the shares with the least total loss within the budget are found by the
knapsack of the balanced plan, which lets the components of a layer differ as well. So may the last steps
here: a layer's step is several of the grid, and the budget is met to one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from trisect.plan.balanced import choices_of
from trisect.plan.curves import Curves
from trisect.plan.knapsack import Choice, least_cost, settled, smallest_step, spend
from trisect.plan.plan import Plan
from trisect.plan.problem import Key, Planner, Problem

RATIO_STEP = 0.01


@dataclass(frozen=True, kw_only=True)
class LayerChoice(Choice):
    """All widths of one layer; `width` is their sum."""

    widths: tuple[tuple[Key, int], ...]


def search_planner(problem: Problem, curves: Curves) -> Planner:
    """The layer ratios that lose least within any budget."""
    curves.check(problem.shape, problem.keys)
    layers = sorted({layer for layer, _ in problem.keys})
    items = [_choices(problem, curves, layer) for layer in layers]
    single = {key: choices_of(problem, curves, key) for key in problem.keys}

    def at(budget: int) -> Plan:
        picked = spend(items, budget=budget)
        widths = dict(width for choice in picked for width in choice.widths)
        return problem.plan(_last_steps(problem, curves, single, widths, budget))

    smallest = smallest_step(list(single.values()))
    return Planner(least=least_cost(items), smallest=smallest, at=at, curved=True)


def _last_steps(
    problem: Problem,
    curves: Curves,
    single: Mapping[Key, list[Choice]],
    widths: Mapping[Key, int],
    budget: int,
) -> dict[Key, int]:
    """Single components a step wider or narrower, until less than one of their steps is left."""
    items, picked = [], []
    for key, width in widths.items():
        here = Choice(width=width, cost=problem.costs.of(*key, width), loss=curves.loss_at(*key, width))
        others = [choice for choice in single[key] if choice.width != width]
        items.append(sorted([here, *others], key=lambda choice: choice.width))
        picked.append(here)
    last = settled(items, picked, budget=budget, at_least=problem.at_least)
    return {key: choice.width for key, choice in zip(widths, last, strict=True)}


def _choices(problem: Problem, curves: Curves, layer: int) -> list[LayerChoice]:
    """The layer's uniform widths at every ratio, as far as curves, grid and floors reach; narrowest first."""
    keys = [key for key in problem.keys if key[0] == layer]
    grids = [problem.grid(key) for key in keys]
    ends = [
        max(problem.lowest(key), grid.up(curves.floor(*key))) for key, grid in zip(keys, grids, strict=True)
    ]
    found: dict[tuple[int, ...], LayerChoice] = {}
    for step in range(round(1 / RATIO_STEP)):
        widths = tuple(
            max(end, grid.width_at(step * RATIO_STEP)) for end, grid in zip(ends, grids, strict=True)
        )
        pairs = tuple(zip(keys, widths, strict=True))
        found[widths] = LayerChoice(
            width=sum(widths),
            cost=problem.cost(dict(pairs)),
            loss=sum(curves.loss_at(*key, width) for key, width in pairs),
            widths=pairs,
        )
    return list(found.values())[::-1]
