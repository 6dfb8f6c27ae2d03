"""Measure loss curves: narrow one component of one layer at a time and see what the whole model loses.

The component is solved on the dense stream; the layers behind it are run on windows that took no part in the
solving. Everything in front of the layer is the dense model's, so its hidden states are carried along, not
computed again.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trisect.calibrate import Progress, Stream, TwoStreams
from trisect.calibrate.replay import in_batches
from trisect.config import CompressConfig
from trisect.data import TEST_SHARE, Tokens
from trisect.errors import TrisectError
from trisect.methods import METHODS
from trisect.methods.method import ComponentMethod, Method, Options, options_of, solve
from trisect.models import LayerView, fingerprint, layer_views
from trisect.models.streamed import walk
from trisect.pipeline.statistics import narrow_moments
from trisect.plan import CURVED, MINIMUM_HEAD, Curves, read_curves
from trisect.records.parts import COMPONENTS
from trisect.support import distributed
from trisect.support.files import write_json


class HeldOutLoss:
    """The loss on a few windows, from any layer on."""

    def __init__(self, model: Any, views: list[LayerView], ids: Tensor, *, batch_size: int | None):
        self.model, self.views, self.ids = model, views, ids
        batches = in_batches(ids, batch_size=batch_size).batches
        self.stream = Stream.embed(model, views, batches, copies=2)

    def advance(self, view: LayerView) -> None:
        self.stream.advance(view)

    def perplexity(self, first: int) -> float:
        return math.exp(self.loss(first))

    @torch.no_grad()
    def loss(self, first: int) -> float:
        """Mean loss in nats per predicted token when layers `first` and later run as they now are."""
        onward = self.stream.copy()
        for view in self.views[first:]:
            onward.advance(view)
        device = next(self.model.parameters()).device
        total, start = 0.0, 0
        for states in onward.hidden:
            ids = self.ids[start : start + len(states)].to(device)
            start += len(states)
            with _answering(self.views, states):
                logits = self.model(input_ids=ids, use_cache=False).logits
            losses = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"
            )
            total += losses.double().item()
        return total / (self.ids.shape[0] * (self.ids.shape[1] - 1))


@contextmanager
def _answering(views: list[LayerView], states: Tensor) -> Iterator[None]:
    """Every layer answers with the same hidden states: the model's tail turns them into logits."""
    try:
        for view in views:
            answer = (states, None) if view.family.tuple_output else states
            view.layer.forward = lambda *_, answer=answer, **__: answer
        yield
    finally:
        for view in views:
            del view.layer.forward


log = logging.getLogger(__name__)

HEAD_SHARES = (0.875, 0.75, 0.625, 0.5, 0.375)
SHARES = {"qk": HEAD_SHARES, "ov": HEAD_SHARES, "mlp": tuple(k / 12 for k in range(11, 4, -1))}
"""Shares of each width that are measured; in between the curve is a straight line. The MLP has most of the
parameters and is cut in the smallest steps, so its curve is the finest."""
LOW_SHARES = (0.25, 0.125)
CHEAP = 0.002
"""Nats per token: where the narrowest width costs less, those low ones are measured, too."""
MEASURED = ("a3", "a3+")
"""Methods that curves are measured with; the others go by those of the last."""


def measure_curves(
    model: Any,
    tokens: Tokens,
    method: Method,
    *,
    parts: tuple[str, ...] = COMPONENTS,
    options: Options | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Curves:
    """The rise of the loss at SHARES of every width, one component of one layer at a time."""
    solving, testing = held_out(tokens.ids)
    views = layer_views(model, own=True)
    streams = TwoStreams(model, views, solving, batch_size=batch_size, seed=seed)
    held_out_loss = HeldOutLoss(model, views, testing, batch_size=batch_size)
    dense = held_out_loss.loss(0)
    points: dict[tuple[int, str], dict[int, float]] = {}
    options = options or Options()
    slot_reads = method.slot_reads if isinstance(method, ComponentMethod) else frozenset()
    for view in walk(model):
        dense_moments = streams.begin(view, slot_reads if "qk" in parts else frozenset())
        for part in (part for part in parts if part in view.components):
            loss = _trial(streams, held_out_loss, view, part, method, dense_moments, options)
            points[view.index, part] = _curve(view, part, loss, dense)
            if progress is not None:
                done = view.index * len(parts) + parts.index(part) + 1
                progress("curves", done, len(views) * len(parts))
        streams.narrow = streams.dense.copy()
        held_out_loss.advance(view)
    return Curves(
        points=points, fingerprint=fingerprint(model), token_hash=tokens.hash, method=method.name, dense_loss=dense
    )


def _trial(
    streams: TwoStreams,
    held_out_loss: HeldOutLoss,
    view: LayerView,
    part: str,
    method: Method,
    dense_moments: dict[str, Tensor],
    options: Options,
) -> Callable[[int], float]:
    """Width -> the whole model's loss with one component that narrow; the component is put back."""
    # Slots are another set for every width, so QK is looked at again for each; the others once.
    gathered: dict[str, Tensor] = {}

    def loss(width: int) -> float:
        nonlocal gathered
        if part == "qk" or not gathered:
            gathered = narrow_moments(streams, view, part, method, dense_moments, width, options)
        with view.trial():
            whole = view.part(part)
            view.apply(solve(method, part, whole, gathered, width=width, options=options))
            return held_out_loss.loss(view.index)

    return loss


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
    known = None
    if path is not None and distributed.broadcast(Path(path).exists()):
        known = read_curves(path, fingerprint=fingerprint(model))
        if config.method in MEASURED and config.method != known.method:
            log.warning("the loss curves were measured with %s, the plan is for %s", known.method, config.method)
    measured = {part for _, part in known.points} if known is not None else set()
    missing = tuple(part for part in config.parts if part not in measured)
    if known is not None and not missing:
        return known
    if tokens is None:
        raise TrisectError("Loss curves are measured on tokens, not on moments; leave --moments out.")
    if known is not None and known.token_hash != tokens.hash:
        raise TrisectError(
            f"{path} has no curves of {','.join(missing)} and was measured on other calibration tokens; "
            "calibrate on the same, or name a new file with --curves."
        )
    method = config.method if config.method in MEASURED else MEASURED[-1]
    curves = measure_curves(
        model,
        tokens,
        METHODS[known.method if known is not None else method],
        parts=missing,
        options=options_of(config),
        batch_size=config.calibration.batch_size,
        seed=config.seed,
        progress=progress,
    )
    if known is not None:
        curves = replace(curves, points={**known.points, **curves.points})
    if path is not None and distributed.is_rank_zero():
        write_json(path, curves.to_dict())
    return curves


def _curve(view: LayerView, part: str, loss: Callable[[int], float], dense: float) -> dict[int, float]:
    full = view.shape().width(part)
    curve = {full: 0.0}
    for width in _widths(full, part, SHARES[part]):
        curve[width] = loss(width) - dense
    for width in _widths(full, part, LOW_SHARES):
        if width not in curve and curve[min(curve)] < CHEAP:
            curve[width] = loss(width) - dense
    return curve


def _widths(full: int, part: str, shares: tuple[float, ...]) -> list[int]:
    """Widths at shares of the full one, the widest first."""
    step = 8 if part != "mlp" and full >= 32 else 2
    widths = {max(MINIMUM_HEAD, round(full * share) // step * step) for share in shares}
    return sorted((width for width in widths if width < full), reverse=True)
