"""Measure loss curves: narrow one component of one layer at a time and see what the whole model loses."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, no_grad

from trisect.calibrate import Progress, Stream, TwoStreams, fisher, replay
from trisect.config import CompressConfig
from trisect.data import TEST_SHARE, Tokens
from trisect.errors import TrisectError
from trisect.evaluate.perplexity import window_losses
from trisect.methods import METHODS, Method, options_of, solve
from trisect.models import LayerView, fingerprint, layer_views, streamed
from trisect.plan import CURVED, MINIMUM_HEAD, Curves, read_curves
from trisect.records.parts import Solution
from trisect.support import distributed, files


class HeldOutLoss:
    """The loss on a few windows, from any layer on."""

    def __init__(self, model: Any, views: list[LayerView], ids: Tensor, *, batch_size: int | None):
        self.model, self.views, self.ids = model, views, ids
        batches = replay.in_batches(ids, batch_size=batch_size).batches
        self.stream = Stream.embed(model, views, batches, copies=2)

    @no_grad()
    def loss(self, first: int) -> float:
        """Mean loss in nats per predicted token when layers `first` and later run as they now are."""
        onward = self.stream.copy()
        for view in self.views[first:]:
            onward.advance(view)
        rest, total = iter(self.ids.split(1)), 0.0
        for states in onward.hidden:
            # One window at a time: logits of a large vocabulary are the largest tensors of all.
            for window, ids in zip(states.split(1), rest, strict=False):
                with replay.answering(self.model, self.views, window):
                    logits = self.model(input_ids=ids.to(window.device), use_cache=False).logits
                total += window_losses(logits, ids).item()
        return total / (self.ids.shape[0] * (self.ids.shape[1] - 1))


log = logging.getLogger(__name__)

HEAD_SHARES = (0.875, 0.75, 0.5, 0.25)
SHARES = {"qk": HEAD_SHARES, "ov": HEAD_SHARES, "mlp": (11 / 12, 0.75, 0.5, 0.25)}
"""Shares of each width that are measured; `Curves` knows what lies in between."""
TEST_TOKENS = 1 << 15  # tokens that a change is measured on; more would say the same
DRAWS = 8  # most answers that are drawn for a token, where there are fewer tokens than that
LEFT_OUT = ("fisher", "fold", "values", "refit-up")
"""Pieces of a3+ that take long at every width and move all layers alike: folding looks at the text again."""
MEASURED = ("a3", "a3+")  # methods that curves are measured with; the others go by those of the last


def measure_curves(
    model: Any, tokens: Tokens, method: Method, config: CompressConfig, *, progress: Progress | None = None
) -> Curves:
    """The rise of the loss at SHARES of every width, one component of one layer at a time.     [math.md A-6]"""
    # Every component is solved on the dense stream, and what it then changes in its layer's output is judged by
    # gradients of answers that the dense model gives on windows which took no part in the solving.
    solving, testing = held_out(tokens.ids)
    # Spread over all that are held out: there may be several texts.
    testing = testing[:: -(-testing.numel() // TEST_TOKENS)]
    draws = min(DRAWS, max(1, TEST_TOKENS // testing.numel()))
    views, batch_size, seed = layer_views(model, own=True), config.calibration.batch_size, config.seed
    answers = fisher.DrawnAnswers(model, views, testing, draws=draws, batch_size=batch_size, seed=seed)
    streams = TwoStreams(model, views, solving, batch_size=batch_size, seed=seed)
    points: dict[tuple[int, str], dict[int, float]] = {}
    options = replace(options_of(config), rope_scope="head", refine=False, without=(*config.without, *LEFT_OUT))
    for view in streamed.walk(model):
        present = [part for part in config.parts if part in view.components]
        dense = streams.begin(view, method.reads_for("qk") if "qk" in present else frozenset())
        answers.begin(view)
        for part in present:
            moments = dense if part == "qk" else streams.statistics(view, part, method.reads_for(part))
            solved = partial(solve, method, part, moments=moments, options=options)
            points[view.index, part] = _curve(answers, view, part, solved)
            if progress is not None:
                done = view.index * len(config.parts) + config.parts.index(part) + 1
                progress("curves", done, len(views) * len(config.parts))
        streams.narrow = streams.dense.copy()
        answers.finish(view)
    made_of = {"fingerprint": fingerprint(model), "token_hash": tokens.hash, "method": method.name}
    return Curves(points=points, dense_loss=answers.loss, **made_of)


def _curve(
    answers: fisher.DrawnAnswers, view: LayerView, part: str, solved: Callable[..., Solution]
) -> dict[int, float]:
    """Width -> rise, with one component that narrow; it is put back every time."""
    full = view.shape().width(part)
    step = 64 if full >= 1024 else 8 if part != "mlp" and full >= 32 else 2  # products of odd widths are slow
    widths = {max(MINIMUM_HEAD, round(full * share) // step * step) for share in SHARES[part]}
    curve = {full: 0.0}
    for width in sorted((width for width in widths if width < full), reverse=True):
        with view.trial():
            view.apply(solved(part=view.part(part), width=width))
            if view.shape().width(part) != width:  # left whole by the method: nothing below is to be had
                break
            curve[width] = answers.rise(view)
    return curve


def held_out(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Windows to solve on, and held-out ones."""
    num_test = max(1, len(ids) // TEST_SHARE)
    return ids[:-num_test], ids[-num_test:]


def curves_for(
    model: Any, config: CompressConfig, tokens: Tokens | None, *, path: str | Path | None, progress: Progress | None
) -> Curves | None:
    """The loss curves a plan goes by: from their file as far as it has them, the rest measured and added."""
    if config.allocate not in CURVED or METHODS[config.method].linear:
        return None
    method = config.method if config.method in MEASURED else MEASURED[-1]
    known = Curves(fingerprint=fingerprint(model), token_hash="", method=method, points={})
    if path is not None and distributed.broadcast(Path(path).exists()):
        known = read_curves(path, fingerprint=known.fingerprint)
        if config.method in MEASURED and config.method != known.method:
            log.warning("the loss curves were measured with %s, the plan is for %s", known.method, config.method)
    measured = {part for _, part in known.points}
    missing = tuple(part for part in config.parts if part not in measured)
    if not missing:
        return known
    if tokens is None:
        raise TrisectError("Loss curves are measured on tokens, not on moments; leave --moments out.")
    if measured and known.token_hash != tokens.hash:
        other = f"{path} has no curves of {','.join(missing)} and was measured on other calibration tokens"
        raise TrisectError(f"{other}; calibrate on the same, or name a new file with --curves.")
    asked = replace(config, parts=missing)
    curves = measure_curves(model, tokens, METHODS[known.method], asked, progress=progress)
    curves = curves.model_copy(update={"points": {**known.points, **curves.points}})
    if path is not None and distributed.is_rank_zero():
        files.write_json(path, curves.to_dict())
    return curves
