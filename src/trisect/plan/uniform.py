"""The uniform plan: the same share off every chosen component of every chosen layer.          [math.md A-4]

Where one width for all layers cannot meet the budget, some layers have the next width on the grid.
"""

from collections.abc import Sequence

from trisect.config import Share
from trisect.plan.costs import Costs
from trisect.plan.plan import Plan
from trisect.plan.problem import Key, Planner, Problem, pose
from trisect.plan.steps import Group, groups_of
from trisect.shapes import ModelShape

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

    return Planner(
        least=sum(group.cost(group.last) for group in groups),
        smallest=smallest,
        at=at,
        curved=False,
    )


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
