"""Loss curves: what each component of each layer costs at a few widths. Measured once, for any budget.

And the smallest plan whose loss stays within a bound: a few measurements, each where the last ones point.  [A-5]
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, SkipValidation

from trisect.config import Increase
from trisect.errors import TrisectError
from trisect.plan.problem import Planner, Problem
from trisect.records.plan import Plan
from trisect.records.shapes import COMPONENTS, ModelShape
from trisect.support.checks import read_table, table_rows, validated

HIGHEST_LOSS = 500  # nats per token: a model that gives every token of the largest vocabulary the same chance has 17
TINY = 1e-12  # nats per token below which a rise has no logarithm worth taking


class Point(BaseModel, strict=True):
    """A row of a file of curves."""

    layer: NonNegativeInt
    component: str
    width: PositiveInt
    loss: float = Field(gt=-HIGHEST_LOSS, lt=HIGHEST_LOSS)


class Curves(BaseModel, strict=True, frozen=True):
    """Rise of the loss when one component of one layer is narrowed alone."""

    fingerprint: str  # of the model they were measured on
    token_hash: str
    method: str = "a3+"  # the method that narrowed the components
    dense_loss: float | None = Field(default=None, gt=-HIGHEST_LOSS, lt=HIGHEST_LOSS)
    """The whole model's loss on the same windows, in nats per token; None in files that do not say."""
    points: SkipValidation[Mapping[tuple[int, str], Mapping[int, float]]]
    """(layer, component) -> width -> rise of the mean loss in nats per token; the full width is 0."""

    def loss_at(self, layer: int, component: str, width: int) -> float:
        """The curve at any width: from point to point a power of what is removed; its slope never falls."""
        # A rise is measured with noise, and a slope that falls would make the knapsack cut deep for nothing.
        full, *points = sorted(self.points[layer, component].items(), reverse=True)
        removed, here, slope = full[0] - width, (0, 0.0), 0.0
        for narrow, rise in points:
            x, (x_0, y_0) = full[0] - narrow, here
            slope = max(slope, (rise - y_0) / (x - x_0))
            y = y_0 + slope * (x - x_0)
            if removed <= x:
                if y_0 < TINY:
                    return y * max(0, removed - x_0) / (x - x_0)
                return y_0 * (removed / x_0) ** (math.log(y / y_0) / math.log(x / x_0))
            here = x, y
        if removed == 0:
            return 0.0
        end = f"The curve of {component} in layer {layer} ends at width {full[0] - here[0]}"
        raise TrisectError(f"{end}; {width} is below it. Use a smaller --ratio.")

    def floor(self, layer: int, component: str) -> int:
        return min(self.points[layer, component])

    def rise(self, shape: ModelShape, plan: Plan) -> float:
        """The loss that a plan is predicted to add, in nats per token: what its components add alone."""
        narrowed = {
            (index, component): plan.layers[index].of(component)
            for index, layer in enumerate(shape.layers)
            for component in COMPONENTS
            if plan.layers[index].of(component) != layer.width(component)
        }
        self.check(shape, narrowed)
        if any(width < self.floor(*key) for key, width in narrowed.items()):
            return math.inf  # below the curves nothing is known
        return sum(self.loss_at(*key, width) for key, width in narrowed.items())

    def check(self, shape: ModelShape, keys: Iterable[tuple[int, str]]) -> None:
        """Refuse curves that do not have these components at this model's widths."""
        for layer, component in keys:
            if (layer, component) not in self.points:
                instead = "leave it out with --parts or --layers, or name a new file with --curves"
                raise TrisectError(f"The loss curves have none for {component} of layer {layer}; {instead}.")
            full, widest = shape.layers[layer].width(component), max(self.points[layer, component])
            if full != widest:
                start = f"The loss curves start at width {widest} for {component} of layer {layer}, which has {full}"
                raise TrisectError(f"{start}: they are another model's; name a new file with --curves.")

    def to_dict(self) -> dict[str, Any]:
        """One row per point, ready for JSON; `read_curves` reads it."""
        return {**self.model_dump(exclude={"points"}), "points": table_rows(Point, self.points)}


def read_curves(path: str | Path, *, fingerprint: str | None = None) -> Curves:
    """Curves from a JSON file; with a fingerprint, only those measured on that model."""
    data, points = read_table(path, Point, "points", what="loss curves")
    curves = validated(Curves, {**data, "points": points}, where=f"Cannot read loss curves from {path}")
    if fingerprint not in (None, curves.fingerprint):
        raise TrisectError(f"{path} holds the curves of another model; name a new file with --curves.")
    return curves


TRIES = 6
RESOLUTION = 0.002  # share of the whole budget below which two plans are not told apart
AIM = 0.97  # share of the bound that a trial aims at: landing just outside it is a trial for nothing
NEGLIGIBLE = 0.01  # share of the bound below which a rise is noise and says only: go much further
CURVATURE = 4.0  # without curves, removing a share x is first guessed to cost 4 x^2 nats; trials correct the factor


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One plan and what it was measured to lose."""

    budget: int
    plan: Plan
    rise: float  # of the mean loss, in nats per token
    inside: bool


def smallest_within(
    planner: Planner,
    measure: Callable[[Plan], float],
    *,
    bound: float,
    most: int,
    predict: Callable[[Plan], float] | None = None,
    tries: int = TRIES,
) -> tuple[Trial, list[Trial]]:
    """Bisect the budget between `planner.least` and `most`, the cost of the dense parts; gives best and all trials.

    `measure` says what a plan loses and `predict` what it is expected to; only the shape of the prediction
    matters, every trial corrects its size. The answer is a plan that was measured: a noisy measurement can
    make it larger than need be.
    """
    outside, inside, scale = planner.least - 1, most, 1.0
    plan_at = lru_cache(maxsize=None)(planner.at)
    trials: list[Trial] = []

    def expected(budget: int) -> float:
        return CURVATURE * (1 - budget / most) ** 2 if predict is None else predict(plan_at(budget))

    while len(trials) < tries and inside - outside > max(1, RESOLUTION * most):
        budget = _aimed(expected, AIM * bound / scale, outside, inside)
        if trials:
            # Far enough from what is known that every round narrows it, whatever the prediction says.
            margin = max(1, (inside - outside) // 10)
            known_outside = any(not trial.inside for trial in trials)
            budget = min(max(budget, outside + (margin if known_outside else 1)), inside - margin)
        plan = plan_at(budget)
        known = next((trial for trial in trials if trial.plan.layers == plan.layers), None)
        if known is None:
            rise = measure(plan)
            known = Trial(budget=budget, plan=plan, rise=rise, inside=rise <= bound)
            trials.append(known)
            if rise < math.inf and 0 < expected(budget) < math.inf:
                scale = max(rise, NEGLIGIBLE * bound) / expected(budget)
        inside, outside = (budget, outside) if known.inside else (inside, budget)
    return _best(trials), trials


def predicted_within(problem: Problem, planner: Planner, curves: Curves) -> Plan:
    """The smallest plan that the curves alone predict to stay within the problem's bound."""
    assert isinstance(problem.config.goal, Increase)
    if curves.dense_loss is None and not problem.config.goal.relative:
        share = "give the bound as a share, e.g. --max-ppl-increase 5%"
        raise TrisectError(f"These loss curves do not say what perplexity they start from; {share}.")
    bound = problem.config.goal.nats(curves.dense_loss or 0.0)
    rise = partial(curves.rise, problem.shape)
    best, _ = smallest_within(planner, rise, bound=bound, most=problem.full, predict=rise, tries=20)
    return best.plan


def _aimed(expected: Callable[[int], float], target: float, outside: int, inside: int) -> int:
    """The smallest budget in between that is expected to lose no more than the target."""
    for _ in range(12):
        middle = (outside + inside) // 2
        if middle in (outside, inside):
            break
        outside, inside = (outside, middle) if expected(middle) <= target else (middle, inside)
    return inside


def _best(trials: list[Trial]) -> Trial:
    inside = [trial for trial in trials if trial.inside]
    if inside:
        return min(inside, key=lambda trial: trial.budget)
    if not trials:
        raise TrisectError("The grid and the floor leave nothing to narrow; use --align 8 or lower --floor.")
    mildest = min(trials, key=lambda trial: trial.rise)
    raise TrisectError(
        f"None of {len(trials)} plans stays within the bound: the mildest removes {mildest.plan.ratio:.1%} of the "
        f"decoder's weights and multiplies perplexity by {math.exp(mildest.rise):.4g}; allow more with "
        "--max-ppl-increase, or give --align none, --method a3+ or --allocate balanced, where they are not set."
    )
