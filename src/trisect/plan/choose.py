"""From a config to a plan."""

from trisect.config import CompressConfig, Increase
from trisect.errors import TrisectError
from trisect.plan.balanced import balanced_planner
from trisect.plan.curves import Curves
from trisect.plan.plan import Plan
from trisect.plan.problem import Planner, Problem, problem_for
from trisect.plan.search import search_planner
from trisect.plan.uniform import uniform_planner
from trisect.shapes import ModelShape

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
            "trisect.target.compress_within (`trisect plan --curves FILE` predicts what they will find)."
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
