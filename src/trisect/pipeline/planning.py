"""Plans from sizes alone: what `trisect plan`, a dry run and the first lines of a run show."""

from trisect.config import CompressConfig, Increase
from trisect.errors import TrisectError
from trisect.methods import get_method
from trisect.methods.method import check_parts, options_of
from trisect.pipeline.rank_search import linear_plan
from trisect.plan import Curves, Plan, plan_for
from trisect.plan.allocate import planner_for
from trisect.plan.problem import problem_for
from trisect.plan.smallest import predicted_within
from trisect.records.shapes import ModelShape


def plan_from_shape(shape: ModelShape, config: CompressConfig, curves: Curves | None = None) -> Plan:
    """The plan; under a bound on perplexity, the one that the curves predict to be the smallest."""
    method = get_method(config.method)
    if method.linear:
        return linear_plan(shape, method, config, None, options=options_of(config), progress=None)
    check_parts(method, config.parts)
    if not isinstance(config.goal, Increase):
        return plan_for(shape, config, curves)
    if curves is None:
        raise TrisectError(
            "Only loss curves can predict perplexity: name their file with --curves FILE, and --allocate "
            "balanced or search to have one measured."
        )
    problem = problem_for(shape, config)
    return predicted_within(problem, planner_for(problem, config.allocate, curves), curves)
