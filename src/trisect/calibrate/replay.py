"""The one replay loop: embed once, then carry hidden states through one layer at a time.

Every layer is called exactly as the stock model calls it (masks, positions, rotary tables), because the stock
model itself is asked, once per batch shape, with its layers switched to taking notes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trisect.calibrate.states import States, choose_place
from trisect.clock import stage
from trisect.errors import TrisectError
from trisect.models.view import LayerView

Progress = Callable[[str, int, int], None]
"""(stage, done, total)."""


@dataclass(frozen=True)
class LayerCall:
    """Everything a layer is called with besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _LastNoteTaken(Exception):
    """Leaves the stock forward once the layers' inputs are known."""


class Stream:
    """Hidden states of the calibration tokens, in front of some layer."""

    def __init__(self, hidden: States, calls: dict[int, list[LayerCall]]):
        self.hidden = hidden
        self.calls = calls
        """Batch size -> one call per layer."""

    @classmethod
    def embed(
        cls,
        model: nn.Module,
        views: list[LayerView],
        batches: Sequence[Tensor],
        *,
        place: str = "auto",
        copies: int = 1,
    ) -> "Stream":
        """Hidden states of batches (b, t) in front of the first layer.

        `copies` is how many such sets the caller will keep at a time, for the choice of a place.
        """
        hidden: States | None = None
        calls: dict[int, list[LayerCall]] = {}
        for batch in batches:
            with stage("forward"):
                states, notes = _take_notes(model, views, batch, all_layers=len(batch) not in calls)
            if hidden is None:
                per_token = states[0, 0].numel() * states.element_size()
                needed = copies * per_token * sum(each.numel() for each in batches)
                hidden = States(place=choose_place(place, device=states.device, needed=needed))
            hidden.append(states)
            calls.setdefault(len(batch), notes)
        assert hidden is not None
        return cls(hidden, calls)

    def copy(self) -> "Stream":
        """A stream at the same place that goes its own way."""
        return Stream(self.hidden.copy(), self.calls)

    @torch.no_grad()
    def advance(
        self,
        view: LayerView,
        *,
        progress: Progress | None = None,
        before: Callable[[int], None] | None = None,
    ) -> None:
        """Move past one layer; `before` is told the number of each batch."""
        # One answer at the end: asking after every batch would make the device wait for the host.
        broken: Tensor | bool = False
        for number, states in enumerate(self.hidden):
            if before is not None:
                before(number)
            call = self.calls[len(states)][view.index]
            with stage("forward"):
                output = view.layer(states, *call.args, **call.kwargs)
                output = output[0] if isinstance(output, tuple) else output
                self.hidden[number] = output
                broken = broken | ~output.isfinite().all()
            if progress is not None:
                done = view.index * len(self.hidden) + number + 1
                progress("calibrate", done, len(self.calls[len(states)]) * len(self.hidden))
        if broken:
            raise TrisectError(
                f"The hidden states after layer {view.index} hold NaN or inf; load the model in a wider "
                "dtype (--dtype float32), or check the checkpoint."
            )


@torch.no_grad()
def _take_notes(
    model: nn.Module, views: list[LayerView], batch: Tensor, *, all_layers: bool
) -> tuple[Tensor, list[LayerCall]]:
    """The first layer's hidden states, and each layer's other arguments (only the first's, if so asked)."""
    notes: list[LayerCall] = []
    first: list[Tensor] = []
    heard = views if all_layers else views[:1]
    device = next(model.parameters()).device
    with _noting(heard, notes, first):
        try:
            model(input_ids=batch.to(device), use_cache=False)
        except _LastNoteTaken:
            pass
    return first[0], notes


@contextmanager
def _noting(views: list[LayerView], notes: list[LayerCall], first: list[Tensor]) -> Iterator[None]:
    """Layers note their arguments and pass the hidden states on; the last one leaves the forward."""

    def note(view: LayerView) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            states, args, kwargs = _without_states(args, kwargs)
            notes.append(LayerCall(args, kwargs))
            if not first:
                first.append(states)
            if view is views[-1]:
                raise _LastNoteTaken
            return (states, None) if view.family.tuple_output else states

        return forward

    try:
        for view in views:
            view.layer.forward = note(view)
        yield
    finally:
        for view in views:
            del view.layer.forward


def _without_states(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    if args:
        return args[0], args[1:], kwargs
    rest = dict(kwargs)
    return rest.pop("hidden_states"), args, rest
