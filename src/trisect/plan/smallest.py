"""The smallest plan whose loss stays within a bound: a few measurements, each where the last ones point.

[math.md A-5]
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trisect.config import Increase
from trisect.errors import TrisectError
from trisect.plan.curves import Curves
from trisect.plan.problem import Planner, Problem
from trisect.records.plan import Plan

TRIES = 6
RESOLUTION = 0.002
"""Share of the whole budget below which two plans are not told apart."""
AIM = 0.97
"""Share of the bound that a trial aims at: landing just outside it is a trial for nothing."""
NEGLIGIBLE = 0.01
"""Share of the bound below which a rise is noise and says only: go much further."""
CURVATURE = 4.0
"""Without curves, removing a share x is first guessed to cost 4 x^2 nats; trials correct the factor."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One plan and what it was measured to lose."""

    budget: int
    plan: Plan
    rise: float
    """Of the mean loss, in nats per token."""
    inside: bool

    def to_dict(self) -> dict[str, Any]:
        """The trial as it stands in a receipt."""
        return {"budget": self.budget, "ratio": self.plan.ratio, "rise": self.rise, "inside": self.inside}


@dataclass(frozen=True, kw_only=True)
class Found:
    """The smallest plan measured inside the bound, and everything that was tried for it."""

    best: Trial
    trials: tuple[Trial, ...]


def smallest_within(
    planner: Planner,
    measure: Callable[[Plan], float],
    *,
    bound: float,
    most: int,
    predict: Callable[[Plan], float] | None = None,
    tries: int = TRIES,
) -> Found:
    """Bisect the budget between `planner.least` and `most`, the cost of the dense parts.

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
        if known.inside:
            inside = budget
        else:
            outside = budget
    return Found(best=_best(trials), trials=tuple(trials))


def predicted_within(problem: Problem, planner: Planner, curves: Curves) -> Plan:
    """The smallest plan that the curves alone predict to stay within the problem's bound."""
    assert isinstance(problem.goal, Increase)
    if curves.dense_loss is None and not problem.goal.relative:
        raise TrisectError(
            "These loss curves do not say what perplexity they start from; "
            "give the bound as a share, e.g. --max-ppl-increase 5%."
        )
    bound = problem.goal.nats(curves.dense_loss or 0.0)

    def rise(plan: Plan) -> float:
        return curves.rise(problem.shape, plan)

    return smallest_within(planner, rise, bound=bound, most=problem.full, predict=rise, tries=20).best.plan


def _aimed(expected: Callable[[int], float], target: float, outside: int, inside: int) -> int:
    """The smallest budget in between that is expected to lose no more than the target."""
    low, high = outside, inside
    for _ in range(12):
        middle = (low + high) // 2
        if middle in (low, high):
            break
        low, high = (low, middle) if expected(middle) <= target else (middle, high)
    return high


def _best(trials: list[Trial]) -> Trial:
    inside = [trial for trial in trials if trial.inside]
    if inside:
        return min(inside, key=lambda trial: trial.budget)
    if not trials:
        raise TrisectError("The grid and the floors leave nothing to narrow; use --align 8 or lower --floor.")
    mildest = min(trials, key=lambda trial: trial.rise)
    raise TrisectError(
        f"None of {len(trials)} plans stays within the bound: the mildest removes {mildest.plan.ratio:.1%} "
        f"of the decoder's weights and multiplies perplexity by {math.exp(mildest.rise):.4g}; "
        f"allow more with --max-ppl-increase, or try {_milder(mildest.plan)}."
    )


def _milder(plan: Plan) -> str:
    """What would let a plan remove less, or lose less by what it removes, and is not so already."""
    finer = {32: "--align 16", 16: "--align 8"}.get(plan.align or 0, "--align none")
    better = ["--method a3+"] if plan.method != "a3+" else []
    found = [*([finer] if plan.align is not None else []), *better, "--allocate balanced where it is not set"]
    return ", ".join(found[:-1]) + f" or {found[-1]}" if len(found) > 1 else found[0]
