"""Measure loss curves: narrow one component of one layer at a time and see what the whole model loses.

The component is solved on the dense stream; the layers behind it are run on windows that took no part in the
solving. Everything in front of the layer is the dense model's, so its hidden states are carried along, not
computed again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trisect.calibrate import Progress, Stream, TwoStreams
from trisect.config import CompressConfig
from trisect.data import Tokens
from trisect.errors import TrisectError
from trisect.files import write_json
from trisect.methods import METHODS
from trisect.methods.method import Method, Options, solve
from trisect.models import LayerView, fingerprint, layer_views
from trisect.parts import COMPONENTS
from trisect.plan import Curves, read_curves
from trisect.plan.align import MINIMUM_HEAD

# Shares of each width that are measured; between them the curve is a straight line.
SHARES = (0.875, 0.75, 0.625, 0.5, 0.375)
TEST_SHARE = 4
"""One window in so many judges."""


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
    num_test = max(1, len(tokens.ids) // TEST_SHARE)
    solving, judging = tokens.ids[:-num_test], tokens.ids[-num_test:]
    views = layer_views(model)
    streams = TwoStreams(model, views, solving, batch_size=batch_size, seed=seed)
    judge = _Judge(model, views, judging, batch_size=batch_size)
    dense = judge.loss(0)
    points: dict[tuple[int, str], dict[int, float]] = {}
    for view in views:
        streams.begin(view)
        for part in parts:
            statistics = streams.statistics(view, part, method.reads[part])

            def rise(
                width: int, part: str = part, view: LayerView = view, statistics: Any = statistics
            ) -> float:
                with view.trial():
                    whole = view.part(part)
                    narrow = solve(method, part, whole, statistics, width=width, options=options or Options())
                    view.write(narrow.part)
                    return judge.loss(view.index) - dense

            points[view.index, part] = _curve(view, part, rise)
            if progress is not None:
                done = view.index * len(parts) + parts.index(part) + 1
                progress("curves", done, len(views) * len(parts))
        streams.narrow.hidden = list(streams.dense.hidden)
        judge.advance(view)
    return Curves(points=points, fingerprint=fingerprint(model), token_hash=tokens.hash)


def curves_for(
    model: Any,
    config: CompressConfig,
    tokens: Tokens | None,
    *,
    options: Options,
    path: str | Path | None,
    progress: Progress | None,
) -> Curves | None:
    """The loss curves a balanced plan needs: from their file where there is one, else measured."""
    if config.allocate != "balanced":
        return None
    if path is not None and Path(path).exists():
        return read_curves(path, fingerprint=fingerprint(model))
    if tokens is None:
        raise TrisectError("Loss curves are measured on tokens, not on moments; leave --moments out.")
    curves = measure_curves(
        model,
        tokens,
        METHODS["a3+"],
        parts=config.parts,
        options=options,
        batch_size=config.calibration.batch_size,
        seed=config.seed,
        progress=progress,
    )
    if path is not None:
        write_json(path, curves.to_dict())
    return curves


def _curve(view: LayerView, part: str, rise: Callable[[int], float]) -> dict[int, float]:
    full = view.shape().width(part)
    step = 8 if part != "mlp" and full >= 32 else 2
    widths = {max(MINIMUM_HEAD, int(full * share) // step * step) for share in SHARES}
    return {full: 0.0, **{width: rise(width) for width in sorted(widths, reverse=True) if width < full}}


class _Judge:
    """The loss on a few windows, from any layer on."""

    def __init__(self, model: Any, views: list[LayerView], ids: Tensor, *, batch_size: int | None):
        self.model, self.views, self.ids = model, views, ids
        self.stream = Stream.embed(model, views, ids, batch_size=batch_size)

    def advance(self, view: LayerView) -> None:
        self.stream.advance(view)

    @torch.no_grad()
    def loss(self, first: int) -> float:
        """Mean loss in nats per predicted token when layers `first` and later run as they now are."""
        onward = Stream(list(self.stream.hidden), self.stream.calls)
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
            view.layer.forward = _answer(view, states)
        yield
    finally:
        for view in views:
            del view.layer.forward


def _answer(view: LayerView, states: Tensor) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (states, None) if view.family.tuple_output else states

    return forward
