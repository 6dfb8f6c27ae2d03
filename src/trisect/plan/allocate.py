"""From a config to a plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trisect.config import CompressConfig, Increase, Share
from trisect.errors import TrisectError
from trisect.plan.costs import Costs
from trisect.plan.curves import Curves
from trisect.plan.knapsack import Choice, least_cost, settled, smallest_step, spend
from trisect.plan.problem import Key, Planner, Problem, grid_of, pose, problem_for
from trisect.plan.uniform import uniform_planner
from trisect.records.plan import Plan
from trisect.records.shapes import ModelShape

# Widths between grid points would only run slower; exact ranks have no grid, so they get the finest one.
FINEST_ALIGN = 8


def balanced_plan(
    shape: ModelShape,
    curves: Curves,
    *,
    ratio: float,
    parts: Sequence[str],
    layers: Sequence[int] | None,
    align: int | None,
    method: str,
) -> Plan:
    """Widths that lose least and remove no more than `ratio` of the chosen components' parameters."""
    costs = Costs(shape=shape, unit="linear")
    goal = Share(budget="params", removed=ratio)
    problem = pose(costs, goal=goal, parts=parts, layers=layers, align=align, method=method)
    return balanced_planner(problem, curves).solve(problem)


def balanced_planner(problem: Problem, curves: Curves) -> Planner:
    """The least loss that any budget can buy."""
    curves.check(problem.shape, problem.keys)
    items = [choices_of(problem, curves, key) for key in problem.keys]

    def at(budget: int) -> Plan:
        widths = [choice.width for choice in spend(items, budget=budget, at_least=problem.at_least)]
        return problem.plan(dict(zip(problem.keys, widths, strict=True)))

    return Planner(least=least_cost(items), smallest=smallest_step(items), at=at, curved=True)


def choices_of(problem: Problem, curves: Curves, key: Key) -> list[Choice]:
    """Every width of the grid that the curve and the floors reach, and the width as it is."""
    layer, part = key
    shape = problem.shape.layers[layer]
    grid = grid_of(shape, part, align=problem.align or FINEST_ALIGN)
    first = max(grid.at_least(problem.floors.of(part)), grid.up(curves.floor(layer, part)))
    return [
        Choice(width=width, cost=problem.costs.of(layer, part, width), loss=curves.loss_at(layer, part, width))
        for width in [*range(first, grid.width, grid.step), grid.width]
    ]


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
    problem: Problem, curves: Curves, single: Mapping[Key, list[Choice]], widths: Mapping[Key, int], budget: int
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
    ends = [max(problem.lowest(key), grid.up(curves.floor(*key))) for key, grid in zip(keys, grids, strict=True)]
    found: dict[tuple[int, ...], LayerChoice] = {}
    for step in range(round(1 / RATIO_STEP)):
        widths = tuple(max(end, grid.width_at(step * RATIO_STEP)) for end, grid in zip(ends, grids, strict=True))
        pairs = tuple(zip(keys, widths, strict=True))
        found[widths] = LayerChoice(
            width=sum(widths),
            cost=problem.cost(dict(pairs)),
            loss=sum(curves.loss_at(*key, width) for key, width in pairs),
            widths=pairs,
        )
    return list(found.values())[::-1]


CURVED = {"search": search_planner, "balanced": balanced_planner}
"""The allocations that are made from loss curves."""


def plan_for(shape: ModelShape, config: CompressConfig, curves: Curves | None = None) -> Plan:
    """The widths a config asks for; an allocation that was not named is the uniform one."""
    check_plannable(config)
    problem = problem_for(shape, config)
    return planner_for(problem, config.allocate, curves).solve(problem)


def check_plannable(config: CompressConfig) -> None:
    """Refuse a goal that only measurements can reach."""
    if isinstance(config.goal, Increase):
        raise TrisectError(
            "A bound on perplexity is kept by measuring, not by planning alone: use `trisect compress` or "
            "pipeline.bounds.compress_within (`trisect plan --curves FILE` predicts what it will find)."
        )


def planner_for(problem: Problem, allocate: str | None, curves: Curves | None = None) -> Planner:
    """One way of sharing out a budget, by name."""
    if allocate in (None, "uniform"):
        return uniform_planner(problem)
    if curves is None:
        raise TrisectError(
            f"Loss curves are needed for --allocate {allocate}: name their file with --curves FILE; "
            "one that does not exist yet is measured and written."
        )
    return CURVED[str(allocate)](problem, curves)
