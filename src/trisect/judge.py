"""The whole model's loss while one layer is on trial: everything in front of it is run only once."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trisect.calibrate import Stream
from trisect.calibrate.windows import in_batches
from trisect.models import LayerView


class Judge:
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
            view.layer.forward = _answer(view, states)
        yield
    finally:
        for view in views:
            del view.layer.forward


def _answer(view: LayerView, states: Tensor) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (states, None) if view.family.tuple_output else states

    return forward
