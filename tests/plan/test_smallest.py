"""The smallest plan within a bound: found in a few measurements, noise or not."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_curves import KEYS, MODEL, RISES, curves_from, every_choice, widths_in
from plan_shapes import layer_shape, model_shape

from trisect.config import CompressConfig
from trisect.errors import TrisectError
from trisect.plan import Curves, Plan, budget_of
from trisect.plan.allocate import planner_for
from trisect.plan.curves import TRIES, predicted_within, smallest_within
from trisect.plan.problem import Planner, Problem, problem_for
from trisect.records.plan import apply_plan

WIDE = model_shape(*[layer_shape(qk=64, pairs=32, vo=64, mlp=1536, d_model=64)] * 3)


def uniform(shape=WIDE, **settings) -> tuple[Problem, Planner]:
    config = CompressConfig(max_ppl_increase="5%", align=8, **settings)
    problem = problem_for(shape, config)
    return problem, planner_for(problem, "uniform")


def removed(plan: Plan) -> float:
    return 1 - budget_of(apply_plan(WIDE, plan)).linear_parameters / budget_of(WIDE).linear_parameters


MILDEST = removed(uniform()[1].at(uniform()[0].full - 1))
"""The first step of the uniform grid."""


def within(measure, *, bound: float = math.log(1.05), **settings):
    problem, planner = uniform()
    return smallest_within(planner, measure, bound=bound, most=problem.full, **settings)


@settings(max_examples=40)
@given(factor=st.floats(0.3, 40), power=st.floats(1.2, 3))
def test_a_monotone_loss_is_bounded_closely(factor, power):
    def measure(plan: Plan) -> float:
        return factor * removed(plan) ** power

    truth = min(1.0, (math.log(1.05) / factor) ** (1 / power))
    if truth < MILDEST:
        with pytest.raises(TrisectError, match="None of"):
            within(measure)
        return
    best, trials = within(measure)
    assert best.inside
    assert len(trials) <= TRIES
    assert best.rise <= math.log(1.05)
    # A step of the uniform grid is 1/8 of attention and 1/24 of the MLP.
    assert truth - 0.09 <= removed(best.plan) <= truth + 1e-9


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), factor=st.floats(0.5, 20))
def test_noise_never_lets_a_plan_outside_the_bound_win(seed, factor):
    generator = random.Random(seed)
    seen: dict[Plan, float] = {}

    def measure(plan: Plan) -> float:
        seen[plan] = factor * removed(plan) ** 2 + generator.gauss(0, 0.01)
        return seen[plan]

    try:
        best, trials = within(measure)
    except TrisectError:
        assert all(rise > math.log(1.05) for rise in seen.values())
        return
    assert seen[best.plan] <= math.log(1.05)
    inside = [removed(trial.plan) for trial in trials if trial.inside]
    assert removed(best.plan) == max(inside)
    assert len(trials) == len(seen) <= TRIES


def test_a_good_prediction_needs_few_trials():
    curves = curves_for(WIDE, lambda share: 0.02 * share**2)
    config = CompressConfig(max_ppl_increase="5%", align=8, allocate="balanced")
    problem = problem_for(WIDE, config)
    planner = planner_for(problem, "balanced", curves)

    def predict(plan: Plan) -> float:
        return curves.rise(WIDE, plan)

    def measure(plan: Plan) -> float:
        return 1.4 * predict(plan)

    best, _ = smallest_within(planner, measure, bound=math.log(1.05), most=problem.full, predict=predict, tries=3)
    assert 0.9 * math.log(1.05) < best.rise <= math.log(1.05)


def curves_for(shape, loss) -> Curves:
    points = {
        (index, part): {int(layer.width(part) * s): loss(1 - s) for s in (1, 0.875, 0.75, 0.625, 0.5, 0.375)}
        for index, layer in enumerate(shape.layers)
        for part in ("qk", "ov", "mlp")
    }
    return Curves(points=points, fingerprint="f", token_hash="t")


def test_a_bound_nothing_keeps_says_how_near_it_came():
    with pytest.raises(
        TrisectError, match=r"None of [1-6] plans .* multiplies perplexity by .*--max-ppl-increase, or give --align"
    ):
        within(lambda plan: 1.0 + removed(plan))


def test_a_bound_everything_keeps_ends_at_the_narrowest():
    problem, planner = uniform()
    best, _ = within(lambda plan: 0.0)
    narrowest = planner.at(planner.least)
    assert removed(best.plan) > 0.95 * removed(narrowest)


def test_nothing_to_narrow_is_said():
    problem, planner = uniform(model_shape(layer_shape(qk=8, pairs=4, vo=8, mlp=64)))
    with pytest.raises(TrisectError, match="nothing to narrow"):
        smallest_within(planner, lambda plan: 0.0, bound=1.0, most=problem.full)


@settings(max_examples=25)
@given(rises=RISES, percent=st.integers(2, 60))
def test_the_predicted_plan_is_inside_and_nothing_much_smaller_is(rises, percent):
    curves = curves_from(rises)
    config = CompressConfig(max_ppl_increase=f"{percent}%", align=8, allocate="balanced")
    problem = problem_for(MODEL, config)
    bound = math.log1p(percent / 100)
    fitting = []
    for widths in every_choice():
        if sum(curves.points[key][width] for key, width in widths.items()) <= bound:
            fitting.append(problem.cost(widths))
    try:
        plan = predicted_within(problem, planner_for(problem, "balanced", curves), curves)
    except TrisectError:
        # Every single step is too much: only the dense model is inside.
        assert min(fitting) >= 0.98 * problem.full
        return
    assert curves.rise(MODEL, plan) <= bound
    assert problem.cost(widths_in(plan)) <= min(fitting) + 0.02 * problem.full


def test_an_absolute_bound_needs_to_know_where_it_starts():
    curves = curves_from([[0.01] * 3] * len(KEYS))
    config = CompressConfig(max_ppl_increase=1.5, align=8, allocate="balanced")
    problem = problem_for(MODEL, config)
    planner = planner_for(problem, "balanced", curves)
    rise = curves.rise(MODEL, predicted_within(problem, planner, curves))
    assert math.exp(2.0 + rise) - math.exp(2.0) <= 1.5
    unknown = Curves(points=curves.points, fingerprint="f", token_hash="t")
    with pytest.raises(TrisectError, match="as a share"):
        predicted_within(problem, planner, unknown)


def test_below_the_curves_nothing_is_predicted():
    curves = curves_from([[0.01] * 3] * len(KEYS))
    problem = problem_for(MODEL, CompressConfig(ratio=0.7, align=8))
    narrow = planner_for(problem, "uniform").at(problem.budget)
    assert curves.rise(MODEL, narrow) == math.inf
