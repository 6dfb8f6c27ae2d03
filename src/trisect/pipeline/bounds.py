"""The smallest model that stays within a bound on perplexity: plan, compress a copy, measure, again.

The bound is kept on calibration windows set aside, never on the text that a result is reported on: one window
in four (the last ones, which loss curves are measured on, too) takes no part in solving and is what every trial is
measured on. They share no token with the others.
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any

from trisect.calibrate import Progress
from trisect.calibrate.texts import with_tokens
from trisect.config import CompressConfig, Increase
from trisect.data import Tokens, tokens_from_tensor
from trisect.errors import TrisectError
from trisect.evaluate.perplexity import perplexity
from trisect.methods import get_method
from trisect.methods.method import check_parts, options_of
from trisect.models import shape_of
from trisect.models.streamed import refuse_streamed
from trisect.pipeline.loss_curves import curves_for, held_out
from trisect.pipeline.run import Compressed, check_model, compress, with_method_defaults
from trisect.plan import Plan
from trisect.plan.allocate import planner_for
from trisect.plan.problem import problem_for
from trisect.plan.smallest import TRIES, smallest_within


def compress_within(
    model: Any,
    config: CompressConfig,
    *,
    tokenizer: Any = None,
    tokens: Tokens | None = None,
    curves: str | Path | None = None,
    tries: int = TRIES,
    progress: Progress | None = None,
) -> Compressed:
    """The smallest of a few compressed copies inside the bound of `config.goal`; `model` stays as it is.

    Memory holds the model, the best copy and the one being tried. The receipt lists all trials.
    """
    goal = _bound(config)
    refuse_streamed(model, "A bound on perplexity is kept by trying copies, which")
    config = with_method_defaults(config)
    check_model(model, config)
    config, tokens = with_tokens(model, config, tokens, tokenizer=tokenizer, progress=progress)
    solving, testing = _split(tokens)
    options = options_of(config)
    loss_curves = curves_for(model, config, tokens, options=options, path=curves, progress=progress)
    shape = shape_of(model)
    problem = problem_for(shape, config)
    dense = perplexity(model, testing)
    bound = goal.nats(dense.nll)
    inside: list[Compressed] = []

    def measure(plan: Plan) -> float:
        trial = compress(copy.deepcopy(model), config, tokens=solving, plan=plan, progress=progress)
        rise = perplexity(trial.model, testing).nll - dense.nll
        if rise <= bound:
            inside[:] = [trial]  # later trials inside the bound are smaller ones
        return rise

    found = smallest_within(
        planner_for(problem, config.allocate, loss_curves),
        measure,
        bound=bound,
        most=problem.full,
        predict=None if loss_curves is None else partial(loss_curves.rise, shape),
        tries=tries,
    )
    inside[0].receipt["target"] = {
        "max_ppl_increase": str(goal),
        "held_out": {"windows": len(testing.ids), "hash": testing.hash, "perplexity": dense.perplexity},
        "trials": [trial.to_dict() for trial in found.trials],
    }
    return inside[0]


def _bound(config: CompressConfig) -> Increase:
    goal, method = config.goal, get_method(config.method)
    if not isinstance(goal, Increase):
        raise TrisectError("No bound on perplexity was given; set max_ppl_increase, e.g. to '5%'.")
    if method.linear:
        raise TrisectError(
            f"{config.method} has ranks of single linear maps and no widths to search over; "
            "use --ratio, or --method a3+."
        )
    check_parts(method, config.parts)
    return goal


def _split(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """Windows to solve on, and windows to measure on."""
    if len(tokens.ids) < 2:
        raise TrisectError(
            "A bound on perplexity is measured on calibration windows set aside; give --samples 8 or more."
        )
    solving, testing = held_out(tokens.ids)
    return (
        tokens_from_tensor(solving, f"{tokens.source} (solving)"),
        tokens_from_tensor(testing, f"{tokens.source} (held out)"),
    )
