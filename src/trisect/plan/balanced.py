"""The balanced plan: the widths whose measured losses add up to least, under an exact budget.

A multiple-choice knapsack, one item per layer and component, one choice per width on the grid.  [math.md A-1]
"""

from collections.abc import Sequence

from trisect.config import Share
from trisect.plan.align import grid_of
from trisect.plan.costs import Costs
from trisect.plan.curves import Curves
from trisect.plan.knapsack import Choice, least_cost, smallest_step, spend
from trisect.plan.plan import Plan
from trisect.plan.problem import Key, Planner, Problem, pose
from trisect.shapes import ModelShape

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
        Choice(
            width=width,
            cost=problem.costs.of(layer, part, width),
            loss=curves.loss_at(layer, part, width),
        )
        for width in [*range(first, grid.width, grid.step), grid.width]
    ]
