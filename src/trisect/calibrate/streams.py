"""Two streams: what the dense model computes, and what the narrow one really feeds its layers.

Each layer of the narrow stream is fitted so that its residual stream comes back to the dense one; what an
earlier layer left undone is part of the target of the next.                                [math.md F-3]
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trisect.calibrate.moments import Accumulator, listening
from trisect.calibrate.replay import TOKENS_PER_BATCH, Progress, Stream
from trisect.calibrate.scores import QUERIES, ScoreSampler
from trisect.errors import TrisectError
from trisect.models.view import LayerView

# One batch in eight chooses the ridge and does not take part in the fit it judges.
HELD_SHARE = 8


class _Enough(Exception):
    """Leaves a layer once its attention has been heard."""


class TwoStreams:
    """Hidden states of both models in front of the same layer."""

    def __init__(
        self, model: nn.Module, views: list[LayerView], ids: Tensor, *, batch_size: int | None, seed: int
    ):
        if len(ids) < 2:
            raise TrisectError(
                "a3+ needs at least two calibration windows, one of them held out; raise --samples."
            )
        # Whole batches are held out, so there must be enough of them.
        fitting = batch_size or max(1, TOKENS_PER_BATCH // ids.shape[1])
        size = max(1, min(fitting, len(ids) // HELD_SHARE))
        self.views, self.seed = views, seed
        self.dense = Stream.embed(model, views, ids, batch_size=size)
        self.narrow = Stream(list(self.dense.hidden), self.dense.calls)
        self.num_held = max(1, len(self.dense.hidden) // HELD_SHARE)
        self.per_window = max(1, -(-QUERIES // len(ids)))

    def begin(self, view: LayerView, *, progress: Progress | None = None) -> None:
        """Run the dense layer, keeping what its two output projections add to the residual stream."""
        self.before = list(self.dense.hidden)
        self.attention_out: list[Tensor] = []
        self.mlp_out: list[Tensor] = []
        o = getattr(view.attention, view.family.o)
        with _keeping(o, self.attention_out), _keeping(view.down, self.mlp_out):
            self.dense.advance(view, progress=progress)

    def statistics(self, view: LayerView, component: str, names: frozenset[str]) -> dict[str, Tensor]:
        """Moments of the layer as it now stands on the narrow stream, with the dense outputs as targets."""
        pairs = view.attention.num_pairs
        sampler = None
        if pairs:
            sampler = ScoreSampler(pairs, per_window=self.per_window, seed=self.seed + view.index)
        accumulator = Accumulator(names, sampler=sampler)
        o = getattr(view.attention, view.family.o)
        attended: list[Tensor] = []
        with listening(view, accumulator), _keeping(o, attended), _stopping(view, component != "mlp"):
            for number, states in enumerate(self.narrow.hidden):
                accumulator.held = number >= len(self.narrow.hidden) - self.num_held
                accumulator.target = self._target(view, number, states, attended)
                call = self.narrow.calls[len(states)][view.index]
                try:
                    view.layer(states, *call.args, **call.kwargs)
                except _Enough:
                    pass
        return accumulator.means(view.index)

    def finish(self, view: LayerView) -> None:
        """Move the narrow stream past the layer as it now is."""
        self.narrow.advance(view)

    def _target(self, view: LayerView, number: int, states: Tensor, attended: list[Tensor]) -> Any:
        """What each output projection should add so that the residual stream is the dense one again."""
        dense, attention = self.before[number], self.attention_out[number]
        # Where the norm follows the residual sum, the gap in front of it is not the gap behind it.
        repairable = getattr(view.layer, "do_layer_norm_before", True)

        def target(tap: str) -> Tensor:
            if tap == "a":
                return attention + (dense - states)
            mlp = self.mlp_out[number].reshape(dense.shape)
            if not repairable:
                return mlp
            return mlp + (dense + attention) - (states + attended[-1])

        return target


@contextmanager
def _keeping(projection: nn.Module, outputs: list[Tensor]) -> Iterator[None]:
    """Keep a projection's outputs without their bias, which narrow and dense model share."""

    def keep(module: Any, args: Any, output: Tensor) -> None:
        outputs.append(output if module.bias is None else output - module.bias)

    handle = projection.register_forward_hook(keep)
    try:
        with torch.no_grad():
            yield
    finally:
        handle.remove()


@contextmanager
def _stopping(view: LayerView, wanted: bool) -> Iterator[None]:
    """Leave the layer behind its attention: the MLP has nothing to say yet."""

    def stop(module: Any, args: Any, output: Any) -> None:
        raise _Enough

    handle = view.attention.register_forward_hook(stop) if wanted else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
