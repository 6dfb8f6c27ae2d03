"""Two streams of hidden states, the dense model's and the narrow one's, and the last norm that joins them again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from trisect.calibrate.attended import LinearisedAttention, every_window
from trisect.calibrate.linearised import every_token
from trisect.calibrate.moments import Accumulator, Goal, recording
from trisect.calibrate.replay import Enough, Progress, States, Stream, beginnings_of, in_batches
from trisect.calibrate.scores import KeyCovariances, PairGrams, QuerySampler, Reading, SlotGrams, shares
from trisect.errors import TrisectError, unknown_name
from trisect.models.families import Family
from trisect.models.heads import QUIET, gain, post_norm, rotation_of
from trisect.models.linear import bias_of
from trisect.models.view import LayerView
from trisect.records.parts import QK, Slots
from trisect.support.clock import stage
from trisect.support.distributed import all_reduce

STATES = 6
"""Sets of hidden states at a time: both streams, the dense one before the layer, two outputs of it, and what the
narrow layer's attention puts out."""


@dataclass(frozen=True, kw_only=True)
class Join:
    """What lies between an output projection and the residual stream.                          [math.md F-7]"""

    scale: float
    norm: tuple[Tensor, float] | None  # weights (D,) and epsilon
    gain: Tensor | None  # (D,) the unit that a part has each channel in
    bias: Tensor | None

    def added(self, output: Tensor) -> Tensor:
        """What the stream gets of an output, its bias left out in both: narrow and dense model share it."""
        if self.norm is None:
            return self.scale * output
        whole = output if self.bias is None else output + self.bias
        return self.scale * self.norm[0] * whole / self._size(output)

    def target(self, output: Tensor, gap: Tensor) -> Tensor:
        """The output, in the part's unit, with which the stream gets `gap` more than with the dense one."""
        if self.norm is None:
            return output + gap / self.scale
        assert self.gain is not None
        weight = self.norm[0]
        live = weight.abs() >= QUIET * weight.abs().max()
        share = torch.where(live, 1 / torch.where(live, self.scale * weight, 1.0), 0.0)
        return (output + gap * share * self._size(output)) * self.gain

    def weight(self, output: Tensor) -> Tensor | float:
        """How much of an error of the output the stream gets, squared: (b, t), or the same for all tokens."""
        return self.scale**2 if self.norm is None else (self.scale / self._size(output).squeeze(-1)).square()

    def _size(self, output: Tensor) -> Tensor:
        """Root mean square (b, t, 1) that the norm divides by."""
        assert self.norm is not None
        whole = output if self.bias is None else output + self.bias
        return (whole.square().mean(dim=-1, keepdim=True) + self.norm[1]).sqrt()


def join_of(view: LayerView, component: str) -> Join:
    """The way of a layer's OV or MLP."""
    scales, name = view.family.residual_scale, "down" if component == "mlp" else "o"
    return Join(
        scale=1.0 if scales is None else float(attrgetter(scales[component == "mlp"])(view.layer)),
        norm=post_norm(view.layer, view.family, component),
        gain=gain(view.layer, view.family, component),
        bias=bias_of(view.module(name)) if name in view.linears() else None,
    )


LAST_TAPS = {"qk": "rotated", "ov": "a"}
"""Behind which attention has nothing more to say of a component."""


class TwoStreams:
    """Hidden states of both models in front of the same layer."""

    def __init__(
        self,
        model: nn.Module,
        views: list[LayerView],
        ids: Tensor,
        *,
        batch_size: int | None,
        seed: int,
        split: bool = False,
        place: str = "auto",
        more: int = 0,
    ):
        """`more` sets of states will be kept beside the usual ones, by whoever gathers statistics."""
        if len(ids) < 2:
            raise TrisectError("a3+ needs at least two calibration windows, one of them held out; raise --samples.")
        how: Any = {"batch_size": batch_size, "hold_out": True, "split": split}
        self.windows = in_batches(ids, **how, beginnings=beginnings_of(ids, seed=seed))
        self.views, self.seed, self.every, self.every_window = views, seed, every_token(ids), every_window(*ids.shape)
        decoder = views[0].family.layers.rpartition(".")[0]
        self.rotation = rotation_of(model.get_submodule(decoder))
        self.dense = Stream.embed(model, views, self.windows.batches, place=place, copies=STATES + more)
        self.narrow = self.dense.copy()
        self.per_window, self.sampled = shares(len(ids), ids.shape[1])

    def begin(
        self, view: LayerView, names: frozenset[str] = frozenset(), *, progress: Progress | None = None
    ) -> dict[str, Tensor]:
        """Run the dense layer, keeping what its two output projections add to the residual stream.

        Gives the moments `names` of it; with sampled ones come the rates its pairs turn at, if those are
        the same for all lengths.
        """
        rates = self._rates(view)
        self.before = self.dense.hidden.copy()
        self.attended = States(place=self.before.place)
        accumulator = self._accumulator(view, names, rates)
        kept = {module: States(place=self.before.place) for module in ("mixer", "mlp_output", "beside", "mlp_beside")}
        self.attention_out, self.mlp_out, self.beside_out, self.shared_out = kept.values()
        hooks = [(getattr(view, module), _keep(outputs)) for module, outputs in kept.items()]
        with recording(view, accumulator), _hooked(*hooks):
            self.dense.advance(view, progress=progress, before=partial(self._announce, accumulator))
        found = accumulator.means(view.index)
        if "keys" in found and rates is not None and self.rotation is not None:
            # Pairs folded before no longer turn by the table, and have its scaling in their weights.
            scaling = self.rotation.scaling if view.attention.rotary_rates is None else 1.0
            found |= {"rates": rates, "rotary_scaling": torch.tensor(scaling, dtype=torch.float64)}
        return found

    def statistics(
        self,
        view: LayerView,
        component: str,
        names: frozenset[str],
        *,
        slots: Sequence[Slots] = (),
        metric: Tensor | None = None,
        chosen: range | None = None,  # experts
    ) -> dict[str, Tensor]:
        """Moments of the layer as it now stands on the narrow stream, with the dense outputs as targets.

        With `slots`, the sampled queries say how well these would stand in for the layer's pairs.
        """
        accumulator = self._accumulator(view, names, self._rates(view) if slots else None, slots)
        accumulator.chosen = chosen or accumulator.chosen
        attended, beside = States(), States()
        hooks = (view.attention_module or view.mixer, _keep(attended, view.mixer)), (view.beside, _keep(beside))
        if component in LAST_TAPS:
            self.attended.clear()
        with (
            recording(view, accumulator),
            _hooked(*hooks),
            _until(view, component),
            self._attending_once(view, component),
        ):
            for number, states in enumerate(self.narrow.hidden):
                self._announce(accumulator, number)
                attended.clear()
                beside.clear()
                accumulator.goal = Goal(
                    target=self._target(view, number, states, attended, beside),
                    weight=partial(self._weight, view, number),
                    metric=metric,
                )
                call = self.narrow.call(number, view.index)
                with stage("forward"), suppress(Enough):
                    view.layer(states, *call.args, **call.kwargs)
        found = accumulator.means(view.index)
        for number, one in enumerate(slots):
            found |= {f"slots{number}_{name}": value for name, value in vars(one).items()}
        return found

    def attention_to_first_order(self, view: LayerView, *, metric: Tensor | None = None) -> dict[str, Tensor]:
        """How the narrow layer's heads answer to a change of the maps in front of them, and what they lack.  [F-11]"""
        beside, how = States(), {"every": self.every_window, "last": self.windows.whole - 1}
        found = LinearisedAttention(view, metric=metric, shared=self.windows.shared, **how)
        with _hooked((view.beside, _keep(beside))):
            for number, states in enumerate(self.narrow.hidden):
                numbers = self.windows.numbers[number]
                if bool((numbers >= self.windows.whole).all()):
                    continue
                beside.clear()
                call = self.narrow.call(number, view.index)
                with stage("forward"), found.watched() as seen:
                    view.layer(states, *call.args, **call.kwargs)
                target, weight = self._target(view, number, states, States(), beside), self._weight(view, number, "a")
                with stage("attention"):
                    found.append(seen, target("a"), weight, numbers=numbers, held=self.windows.held(number))
        with stage("attention"):
            return found.moments()

    def _accumulator(
        self, view: LayerView, names: frozenset[str], rates: Tensor | None, slots: Sequence[Slots] = ()
    ) -> Accumulator:
        """Sums of moments, and of what sampled queries say of pairs, of keys where rates are known, or of slots."""
        readings: list[Reading] = [PairGrams(view.pairs)] if view.pairs and "scores" in names and not slots else []
        if rates is not None and "keys" in names:
            readings.append(KeyCovariances(rates))
        if rates is not None and slots:
            readings.append(SlotGrams(slots, rates))
        seed, softcap = self.seed + view.index, view.attention.softcap if readings else None
        how: Any = {"per_window": self.per_window, "every": self.sampled, "seed": seed, "softcap": softcap}
        sampled = QuerySampler(readings, **how)
        sampler = sampled if readings else None
        return Accumulator(
            names, sampler=sampler, shared=self.windows.shared, place=self.before.place, every=self.every
        )

    def _announce(self, accumulator: Accumulator, batch: int) -> None:
        """Tell whoever listens which windows come next."""
        self._at(batch)
        accumulator.held = self.windows.held(batch)
        if accumulator.sampler is not None:
            numbers = self.windows.numbers[batch].tolist()
            accumulator.sampler.numbers = [number if number < self.windows.whole else None for number in numbers]

    def _rates(self, view: LayerView) -> Tensor | None:
        """Radians per token (k, P) of the layer's pairs, where they are the same for every length."""
        # None also where layers are not told positions, without which pairs cannot turn at rates of their own.
        told = all(calls[view.index].kwargs.get("position_ids") is not None for calls in self.dense.calls.values())
        if not view.pairs or self.rotation is None or not told:
            return None
        part = view.part("qk")
        assert isinstance(part, QK)
        return part.rates if part.rates is not None else self.rotation.rates[part.frequencies]

    def finish(self, view: LayerView) -> None:
        """Move the narrow stream past the layer as it now is."""
        with self._attending_once(view):
            self.narrow.advance(view, before=self._at)

    def _at(self, batch: int) -> None:
        self.batch = batch

    @contextmanager
    def _attending_once(self, view: LayerView, component: str | None = None) -> Iterator[None]:
        """Attention answers as it did in the first pass for an MLP: from there on it stays as it is."""
        attention = view.own()
        if attention is None or component in LAST_TAPS or (component is None and not len(self.attended)):
            yield
            return
        attend = attention.forward

        def answer(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            if len(self.attended) == self.batch:
                self.attended.append(attend(*args, **kwargs)[0])
            return self.attended[self.batch].clone(), None  # some layers add to the output where it lies

        attention.forward = answer  # type: ignore[method-assign]
        try:
            yield
        finally:
            del attention.forward

    def _weight(self, view: LayerView, number: int, tap: str) -> Tensor:
        """One over the squared norm of the dense residual stream in front of a projection's output, (b, t).

        Whoever reads the stream reads it through a norm, which divides an error by just that. In front, so
        that a token which this output makes massive counts in full where it is made.     [math.md F-5, F-7]
        """
        ov, mlp = join_of(view, "ov"), join_of(view, "mlp")
        stream = _plus(wide(self.before[number]), view, self.beside_out, number)
        attention = _kept(self.attention_out, number, stream)
        if tap == "a":
            share = ov.weight(attention)
        else:
            stream = stream + ov.added(attention)
            share = mlp.weight(_kept(self.shared_out if tap == "shared" else self.mlp_out, number, stream))
        energy = stream.square().sum(dim=-1) / self.windows.weight(number)
        return share / energy.clamp(min=torch.finfo(energy.dtype).tiny ** 0.5)

    def _target(self, view: LayerView, number: int, states: Tensor, attended: States, beside: Any = ()) -> Any:
        """What each output projection should put out so that the residual stream is the dense one again."""
        # In more digits than 16 bits have: the repair is a small difference of large numbers.
        dense, states = _plus(wide(self.before[number]), view, self.beside_out, number), wide(states)
        attention = _kept(self.attention_out, number, dense)
        ov, mlp = join_of(view, "ov"), join_of(view, "mlp")
        # Where the norm follows the residual sum, the gap in front of it is not the gap behind it.
        repairable = getattr(view.layer, "do_layer_norm_before", True) and view.mlp_beside is None

        def target(tap: str) -> Tensor:
            narrow = _plus(states, view, beside, -1)
            if tap == "a":
                return ov.target(attention, dense - narrow)
            out = _kept(self.shared_out if tap == "shared" else self.mlp_out, number, dense)
            if not repairable:
                return out
            gap = (dense + ov.added(attention)) - (narrow + ov.added(_kept(attended, -1, states)))
            return mlp.target(out, gap)

        return target


@contextmanager
def _hooked(*hooks: tuple[nn.Module | None, Callable[..., None]]) -> Iterator[None]:
    """Modules with forward hooks, which are taken off again."""
    handles = [module.register_forward_hook(hook) for module, hook in hooks if module is not None]
    try:
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()


def _keep(outputs: States, biased: nn.Module | None = None) -> Callable[..., None]:
    """A hook that keeps outputs without the bias, its module's or another's, which narrow and dense model share."""

    def keep(module: Any, args: Any, output: Any) -> None:
        output, bias = output[0] if isinstance(output, tuple) else output, getattr(biased or module, "bias", None)
        # A copy: some layers add to the output where it lies.
        outputs.append(output - bias if isinstance(bias, Tensor) else output.clone())

    return keep


@contextmanager
def _until(view: LayerView, component: str) -> Iterator[None]:
    """Layers are left where all that a component's solver reads has been seen; inside `recording`."""

    def leave(*_: Any) -> None:
        raise Enough

    attention, handles = view.own(), []
    if component not in LAST_TAPS:
        if view.experts is None and "mlp" in view.components:
            handles.append(view.module("down").register_forward_pre_hook(leave))
    elif attention is not None:
        handles.append(attention.register_forward_hook(leave))  # channels that do not rotate have no such tap
        tap = attention.tap
        assert tap is not None

        def tapped(name: str, *seen: Any) -> None:
            tap(name, *seen)
            if name == LAST_TAPS[component]:
                leave()

        attention.tap = tapped
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _kept(outputs: States, number: int, like: Tensor) -> Tensor:
    """What a projection put out, in the shape of the stream; zeros where the layer has no such projection."""
    return wide(outputs[number]).reshape(like.shape) if len(outputs) else torch.zeros_like(like)


def _plus(stream: Tensor, view: LayerView, beside: Any, number: int) -> Tensor:
    """The stream with what is added to it beside attention, where anything is."""
    return stream + view.beside_scale * _kept(beside, number, stream) if len(beside) else stream


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


@torch.no_grad()
def scale_last_norm(norm: nn.Module | None, streams: TwoStreams) -> float:
    """Multiply the last norm with E<x, y> / E|x|^2, both streams being behind the last layer.   [math.md F-4]"""
    # What the narrow model gets wrong lies on its hidden states like noise, and least squares shrinks noise.
    if norm is None:
        return 1.0
    device = next(norm.parameters()).device
    sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in ("cross", "energy")}
    for dense, narrow in zip(streams.dense.hidden, streams.narrow.hidden, strict=True):
        x, y = norm(narrow).double(), norm(dense).double()
        sums["cross"] += (x * y).sum()
        sums["energy"] += x.square().sum()
    if streams.windows.shared:
        sums = all_reduce(sums)
    energy = sums["energy"].item()
    factor = sums["cross"].item() / energy if energy > 0 else 1.0
    offset = streams.views[0].family.norm_offset
    for name, parameter in norm.named_parameters():
        more = offset if name == "weight" else 0.0
        parameter.data = (parameter.data + more) * factor - more
    return factor


def last_norm(model: nn.Module, family: Family) -> nn.Module | None:
    """The norm between the last layer and the head; None in a model that goes without, or without weights in it."""
    decoder = model.get_submodule(family.layers.rpartition(".")[0])
    if not hasattr(decoder, family.last_norm):
        near, hint = dict(decoder.named_children()), "Give the family its last_norm=..., or add --without tail."
        raise unknown_name(f"last norm of family {family.name}", family.last_norm, near, hint)
    norm: nn.Module | None = getattr(decoder, family.last_norm)
    return norm if norm is not None and list(norm.parameters()) else None
