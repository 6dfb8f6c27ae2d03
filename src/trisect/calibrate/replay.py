"""The one replay loop: embed once, then carry hidden states through one layer at a time.

Every layer is called exactly as the stock model calls it (masks, positions, rotary tables): once per batch shape
the stock model runs while its layers temporarily record their arguments.
"""

import os
import tempfile
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn

from trisect.errors import TrisectError
from trisect.models import LayerView, layer_views, looking
from trisect.support import distributed, replaced
from trisect.support.clock import stage

ROOM = {"cuda": 0.35, "host": 0.4}  # shares of the memory that is free that hidden states may take
TOKENS_PER_BATCH = 8192  # per forward pass when the caller does not say: enough to keep the matrix units busy
CACHED_TOKENS = 2048  # the same on a CPU, whose caches hold what a layer makes of so many
HELD_SHARE = 4  # one window in so many is held out: it chooses the ridge and takes no part in the fit
MOST_HELD = 32
"""Windows held out at most, or one for every process: more choose no better and are missed in the fit."""
BEGINNING = 4  # tokens of a beginning
BEGINNING_SHARE = 16  # one of so many calibration tokens again in a beginning,
BEGINNINGS = (16, 2048)  # as long as they come to so many; fewer are left out

Fetch = Callable[[], Tensor]
Progress = Callable[[str, int, int], None]  # (stage, done, total)


class States:
    """A list of tensors on one device, kept in some place."""

    def __init__(self, tensors: Sequence[Tensor] = (), *, place: str = "device"):
        self.place = place
        self._kept: list[Fetch] = []
        for tensor in tensors:
            self.append(tensor)

    def append(self, tensor: Tensor) -> None:
        self._kept.append(_KEEPERS[self.place](tensor))

    def clear(self) -> None:
        self._kept.clear()

    def copy(self) -> "States":
        other = States(place=self.place)
        other._kept = list(self._kept)
        return other

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, number: int) -> Tensor:
        return self._kept[number]()

    def __setitem__(self, number: int, tensor: Tensor) -> None:
        self._kept[number] = _KEEPERS[self.place](tensor)

    def __iter__(self) -> Iterator[Tensor]:
        return (fetch() for fetch in self._kept)


def choose_place(asked: str, *, device: torch.device, needed: int) -> str:
    """Where `needed` bytes of states go: the nearest place that has room, unless one was asked for."""
    if asked != "auto":
        return asked
    if device.type == "cuda" and needed <= ROOM["cuda"] * torch.cuda.mem_get_info(device)[0]:
        return "device"
    if needed <= ROOM["host"] * psutil.virtual_memory().available:
        return "host" if device.type == "cuda" else "device"
    return "disk"


def in_main_memory(x: Tensor) -> Tensor:
    """The tensor there, in pages that stay: a GPU fetches from those many times as fast as from others."""
    if not x.is_cuda:
        return x.to("cpu")
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)


def _on_disk(tensor: Tensor) -> Fetch:
    """A file in the temporary folder that goes when nobody can ask for it any more."""
    handle, name = tempfile.mkstemp(prefix="trisect-states-")
    path, device, shape, dtype = Path(name), tensor.device, tensor.shape, tensor.dtype
    with os.fdopen(handle, "wb") as file:
        # numpy has no bfloat16, but bytes are bytes.
        file.write(tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().data)

    def fetch() -> Tensor:
        content = torch.frombuffer(bytearray(path.read_bytes()), dtype=dtype)
        return content.reshape(shape).to(device)

    weakref.finalize(fetch, path.unlink, missing_ok=True)
    return fetch


_KEEPERS: dict[str, Callable[[Tensor], Fetch]] = {
    "device": lambda tensor: lambda: tensor,
    "host": lambda tensor: partial(in_main_memory(tensor).to, tensor.device, non_blocking=True),
    "disk": _on_disk,
}


def windows_at_once(model: Any, windows: Tensor) -> int:
    """How many of the windows (n, t) go through a layer together: on a GPU more of a narrow model's."""
    device, width = next(model.parameters()).device, model.config.get_text_config().hidden_size
    more = min(8, max(2, 4096 // width))  # or a GPU waits for the host
    tokens = more * TOKENS_PER_BATCH if device.type == "cuda" else CACHED_TOKENS
    return max(1, tokens // windows.shape[1])


@dataclass(frozen=True)
class Windows:
    """Batches of windows, those held out last."""

    batches: list[Tensor]  # each (b, t)
    numbers: list[Tensor]  # (b,) which windows of the whole set they are
    num_held: int  # batches at the end that are held out
    shared: bool  # whether other processes have the rest, so that sums have to be added up
    whole: int  # windows of the whole set; numbers from there on are those of beginnings,
    share: float = 1.0  # whose tokens count so much less than others

    def held(self, batch: int) -> bool:
        return batch >= len(self.batches) - self.num_held

    def weight(self, batch: int) -> float:
        """How much a token of a batch counts."""
        return self.share if self.numbers[batch][0] >= self.whole else 1.0


def in_batches(
    ids: Tensor,
    *,
    batch_size: int | None = None,
    hold_out: bool = False,
    split: bool = False,
    beginnings: Tensor | None = None,
) -> Windows:
    """Windows (n, t), and short ones behind them, in batches; with `split`, this process's share of them."""
    size, shared = batch_size or max(1, TOKENS_PER_BATCH // ids.shape[1]), split and distributed.world_size() > 1
    fit, held = _numbers(len(ids), held_windows(len(ids)) if hold_out else 0, size=size, shared=shared)
    if shared and not (fit and (held or not hold_out)):
        processes = distributed.world_size()
        enough = processes * (HELD_SHARE if hold_out else 1)
        few = f"{len(ids)} calibration windows are too few for {processes} processes"
        raise TrisectError(f"{few}; use --samples {enough} or more.")
    numbers, num_held, share = fit + held, len(held), 1.0
    batches = [ids[batch] for batch in numbers]
    if beginnings is not None:
        apart = len(beginnings) // HELD_SHARE if hold_out else 0
        more, more_held = _numbers(len(beginnings), apart, size=size * ids.shape[1] // BEGINNING, shared=shared)
        share, edge = min(1.0, len(ids) / len(beginnings)), len(fit)
        batches[edge:edge], numbers[edge:edge] = [beginnings[n] for n in more], [len(ids) + n for n in more]
        batches += [beginnings[n] for n in more_held]
        numbers += [len(ids) + n for n in more_held]
        num_held += len(more_held)
    return Windows(batches=batches, numbers=numbers, num_held=num_held, shared=shared, whole=len(ids), share=share)


def _numbers(count: int, num_held: int, *, size: int, shared: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Which of so many windows are in each batch, those that fit and those held out; a process's share of both."""
    # The two sets are the same for any number of processes.
    sets = torch.arange(count).split([count - num_held, num_held])
    if shared:
        sets = tuple(numbers.tensor_split(distributed.world_size())[distributed.rank()] for numbers in sets)
    fit, held = ([batch for batch in numbers.split(size) if len(batch)] for numbers in sets)
    return fit, held


def beginnings_of(ids: Tensor, *, seed: int) -> Tensor | None:
    """Short windows (m, BEGINNING) from anywhere in the others; None where all begin alike, or there are too few."""
    # Attention of most heads rests on the first token, and a few layers make that token massive. A window has one first
    # token, so a few hundred windows leave most of the vocabulary to chance: where a word that was not among them
    # begins a text, nothing becomes massive, and nothing is there to rest on.
    least, most = BEGINNINGS
    count, (n, t) = min(most, ids.numel() // (BEGINNING_SHARE * BEGINNING)), ids.shape
    if count < least or t < 2 * BEGINNING or bool((ids[:, 0] == ids[0, 0]).all()):
        return None
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(n, (count, 1), generator=generator)
    starts = torch.randint(t - BEGINNING + 1, (count, 1), generator=generator)
    return ids[rows, starts + torch.arange(BEGINNING)]


def held_windows(count: int) -> int:
    """How many of so many windows are held out."""
    return max(1, min(count // HELD_SHARE, max(MOST_HELD, distributed.world_size())))


class LayerCall(NamedTuple):
    """Everything a layer is called with besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Enough(Exception):
    """Leaves a layer once all that is asked for has been recorded."""


class _AllRecorded(Exception):
    """Leaves the stock forward once the layers' inputs are known."""


class Stream:
    """Hidden states of the calibration tokens, in front of some layer."""

    def __init__(self, hidden: States, calls: dict[Any, list[LayerCall]]):
        self.hidden = hidden
        self.calls = calls
        """Shape of a batch -> one call per layer; its number instead, where a call is good for one batch only."""

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
        """Hidden states of batches (b, t) in front of the first layer."""
        # `copies` is how many such sets the caller will keep at a time, for the choice of a place.
        hidden: States | None = None
        calls: dict[Any, list[LayerCall]] = {}
        differ = views[0].family.calls_differ
        for number, batch in enumerate(batches):
            key = number if differ else tuple(batch.shape)
            with stage("forward"):
                states, recorded = _record_calls(model, views, batch, all_layers=key not in calls)
            if hidden is None:
                per_token = states[0, 0].numel() * states.element_size()
                needed = copies * per_token * sum(each.numel() for each in batches)
                hidden = States(place=choose_place(place, device=states.device, needed=needed))
            hidden.append(states)
            calls.setdefault(key, recorded)
        assert hidden is not None
        return cls(hidden, calls)

    def copy(self) -> "Stream":
        """A stream at the same place that goes its own way."""
        return Stream(self.hidden.copy(), {key: _apart(calls) for key, calls in self.calls.items()})

    def call(self, number: int, layer: int) -> LayerCall:
        """What a layer is called with for a batch."""
        return (self.calls.get(number) or self.calls[tuple(self.hidden[number].shape[:2])])[layer]

    def through(self, view: LayerView, number: int, states: Tensor) -> Tensor:
        """What a layer makes of the states of a batch."""
        call = self.call(number, view.index)
        output = view.layer(states, *call.args, **call.kwargs)
        found: Tensor = output[0] if isinstance(output, tuple) else output
        return found

    @torch.no_grad()
    def advance(
        self,
        view: LayerView,
        *,
        progress: Progress | None = None,
        before: Callable[[int], None] | None = None,
        label: str = "calibrate",
    ) -> None:
        """Move past one layer; `before` is told the number of each batch."""
        # One answer at the end: asking after every batch would make the device wait for the host.
        broken: Tensor | bool = False
        for number, states in enumerate(self.hidden):
            if before is not None:
                before(number)
            with stage("forward"):
                output = self.through(view, number, states)
                self.hidden[number] = output
                broken = broken | ~output.isfinite().all()
            if progress is not None:
                done, layers = view.index * len(self.hidden) + number + 1, len(next(iter(self.calls.values())))
                progress(label, done, layers * len(self.hidden))
        if broken:
            broke = f"The hidden states after layer {view.index} hold NaN or inf"
            raise TrisectError(f"{broke}; load the model with --dtype float32, or check the checkpoint.")


def _apart(calls: list[LayerCall]) -> list[LayerCall]:
    """Calls of one batch with a dictionary of their own, in which layers leave things for later ones."""
    lent = next((value for value in calls[0].kwargs.values() if isinstance(value, UserDict)), None)
    if lent is None:
        return calls
    mine = copy(lent)
    changed = [{k: mine if value is lent else value for k, value in call.kwargs.items()} for call in calls]
    return [LayerCall(call.args, kwargs) for call, kwargs in zip(calls, changed, strict=True)]


@torch.no_grad()
def _record_calls(
    model: nn.Module, views: list[LayerView], batch: Tensor, *, all_layers: bool
) -> tuple[Tensor, list[LayerCall]]:
    """The first layer's hidden states, and each layer's other arguments (only the first's, if so asked)."""
    calls: list[LayerCall] = []
    first: list[Tensor] = []
    views = views if all_layers else views[:1]

    def record(view: LayerView, *args: Any, **kwargs: Any) -> Tensor:
        """Pass the hidden states on; the last layer leaves the forward."""
        states, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        calls.append(LayerCall(args, kwargs))
        first.append(states)
        if view is views[-1]:
            raise _AllRecorded
        return states

    with _forwards(views, record), suppress(_AllRecorded):
        model(input_ids=batch.to(next(model.parameters()).device), use_cache=False)
    return first[0], calls


@contextmanager
def _forwards(views: list[LayerView], forward: Callable[..., Tensor]) -> Iterator[None]:
    """Layers with another forward, which is called with the view first and gives hidden states."""

    def instead(view: LayerView, *args: Any, **kwargs: Any) -> Any:
        states = forward(view, *args, **kwargs)
        return (states, None) if view.family.tuple_output else states

    try:
        for view in views:
            view.layer.forward = partial(instead, view)
        yield
    finally:
        for view in views:
            del view.layer.forward


@contextmanager
def answering(model: Any, views: list[LayerView], states: Tensor) -> Iterator[None]:
    """Every layer answers with the same hidden states: the model's tail turns them into logits."""
    store = getattr(model, "layer_store", None)
    unread = () if store is None else ((store, "present_now", set(range(len(views)))),)  # no weights are needed
    with replaced(*unread), _forwards(views, lambda *_, **__: states):
        yield


# How much each layer changes the hidden states, and which layers a model misses least.          [math.md A-7]


@torch.no_grad()
def layer_influence(
    model: nn.Module,
    ids: Tensor,
    *,
    batch_size: int | None = None,
    place: str = "auto",
    progress: Progress | None = None,
) -> list[float]:
    """1 - E cos(h_in, h_out) of every layer over the tokens of windows (n, t), in one pass."""
    found: list[float] = []
    views = layer_views(model)
    with looking.training_flags_kept(model):
        model.eval()
        stream = Stream.embed(model, views, in_batches(ids, batch_size=batch_size).batches, place=place, copies=2)
        for view in views:
            before, total = stream.hidden.copy(), 0.0
            stream.advance(view, progress=progress, label="influence")
            for inputs, outputs in zip(before, stream.hidden, strict=True):
                alike = torch.cosine_similarity(inputs.float(), outputs.float(), dim=-1)
                total += alike.sum(dtype=torch.float64).item()
            found.append(1 - total / ids.numel())
    return found


def least_influential(influence: Sequence[float], count: int) -> list[int]:
    """The layers to drop, in order; ties go to the first, and the two ends only where nothing else is left."""
    ends = (0, len(influence) - 1)
    ranked = sorted(range(len(influence)), key=lambda layer: (layer in ends, influence[layer], layer))
    return sorted(ranked[:count])
