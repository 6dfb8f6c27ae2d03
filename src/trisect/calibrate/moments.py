"""Streaming second moments of what a layer computes: which there are, where they are observed, how they add up.

Sums run in float64: moments of a million bf16 activations keep the digits their small eigenvalues live in.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trisect.calibrate.linearised import MAPS, Linearised, lift
from trisect.calibrate.replay import Progress, Stream, in_batches, in_main_memory
from trisect.calibrate.scores import QuerySampler
from trisect.errors import TrisectError
from trisect.models import LayerView, layer_views, streamed
from trisect.models.experts import ExpertView
from trisect.records.parts import INNER, INPUTS, MLP, REGRESSED
from trisect.solve.ridge import gram, product, products
from trisect.support.clock import stage
from trisect.support.distributed import all_reduce, owner_of, rank

# b = batch, t = tokens, n = b t, h = heads, d = head width, I = MLP width, D = d_model

PARTS = 16


def head_grams(x: Tensor) -> Tensor:
    """(b, t, h, d) -> (h, d, d), summed over tokens."""
    x = x.flatten(0, 1).double().transpose(0, 1)  # (n, h, d) -> (h, n, d)
    # A GPU has more to do than heads: the sum in parts, wherever these come out even.
    x = x.unflatten(1, (math.gcd(x.shape[1], PARTS) if x.is_cuda else 1, -1))
    return (x.mT @ x).sum(dim=1)


def square_grams(x: Tensor) -> Tensor:
    """head_grams of the squared channels."""
    return head_grams(x.double().square())


def whole_gram(x: Tensor) -> Tensor:
    """(b, t, h, d) -> (h d, h d)."""
    x = x.flatten(0, 1).flatten(1).double()
    return x.mT @ x


def channel_energy(x: Tensor) -> Tensor:
    """(..., I) -> (I,); heads side by side."""
    return rows(x).double().square().sum(dim=0)


def input_gram(x: Tensor) -> Tensor:
    """(..., I) -> (I, I): products of one batch in float32 at least, the running sum in float64."""
    # Float64 products of an MLP's width would take most of the run, and the numerical floor of whoever reads
    # this is far above the rounding of a batch.
    return gram(rows(x))


def rows(x: Tensor) -> Tensor:
    """One row per token: heads (b, t, h, d) side by side, anything else (..., I) as it is."""
    x = x.flatten(2) if x.ndim == 4 else x
    return x.reshape(-1, x.shape[-1])


READINGS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    **{head: (head, head_grams) for head in ("q", "k", "v", "a")},
    "a_gram": ("a", whole_gram),
    "q_squares": ("q_raw", square_grams),
    "k_squares": ("k_raw", square_grams),
    "mlp": ("down", channel_energy),
    "out_norm": ("out", lambda x: rows(x).double().norm(dim=-1).sum().reshape(1)),
    **{f"{tap}_gram": (tap, input_gram) for tap in ("x", "up", "down")},
    **{f"{tap}_abs": (tap, lambda x: rows(x).double().abs().sum(dim=0)) for tap in INPUTS.values()},
    **{f"{tap}_energy": (tap, channel_energy) for tap in INPUTS.values()},
}
"""Moment -> the hook that it is of, and what is summed over batches."""

# Regressions of a target on what is observed: name -> tap. Each gives NAME_gram, NAME_target, NAME_energy and
# NAME_tokens over the fitting tokens, and the same with _held over the held-out ones. Rows count by the
# weights that come with the target.
REGRESSIONS = {"a": "a", "mlp": "down"}
VALUES = "a_values"
"""Second moment (k, d, d) of the value heads in the metric of the regression "a", over all tokens: what a
head's output could be if it attended to any one token."""
OBSERVED = "observed"  # how many tokens an expert saw
SAMPLED = frozenset({"scores", "keys"})  # sums over sampled queries (scores.py): a sampler that is given gathers them

WIDE_GRAM = 1 << 28
"""Entries. Regressions stand the rounding of larger ones: at a unit diagonal and 28672 features it is at most
some 1e-5 in norm, and the least ridge is ten times that."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What the projections of a layer should put out for the batch at hand, by the tap in front of them."""

    target: Callable[[str], Tensor]  # tap -> (b, t, D)
    weight: Callable[[str], Tensor]  # tap -> (b, t), how much each token's error counts
    metric: Tensor | None = None  # (D, D) a root of how much each direction of it counts


class Accumulator:
    """Sums of the moments asked for, over all batches of one layer."""

    def __init__(
        self,
        names: frozenset[str],
        *,
        sampler: QuerySampler | None = None,
        shared: bool = False,
        place: str = "device",
        every: int = 1,
    ):
        self.every = every  # one token in so many is kept, where single ones are
        self.names, self.place, self.sampler = names, place, sampler
        self.shared = shared  # other processes have sums of other windows, to be added up
        self.regressed = sorted(name for name in REGRESSIONS if f"{name}_target" in names)
        covered = {f"{name}_{what}" for name in self.regressed for what in REGRESSED}
        self.readings = sorted(names - covered - SAMPLED - {VALUES, INNER})
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.held = False
        self.goal: Goal | None = None
        self.linearised = Linearised(place=place, shared=shared, every=every) if INNER in names else None
        self.experts: dict[str, Accumulator] = {}  # by expert, what its own tokens add up to
        self.chosen = range(1 << 30)  # experts whose turn it is, by place and the shared one last

    @property
    def suffix(self) -> str:
        """Of names that fitting and held-out tokens have apart."""
        return "_held" if self.held else ""

    @property
    def wants_mlp(self) -> bool:
        """Whether anything is asked for that MLPs are observed for."""
        taps = {READINGS[name][0] for name in self.readings} | {REGRESSIONS[name] for name in self.regressed}
        return self.linearised is not None or bool(taps & {"up", "down", "out"})

    def expert(self, name: str) -> "Accumulator":
        """The sums of one expert of a mixture, for the batch at hand."""
        found = self.experts.setdefault(
            name, Accumulator(self.names, shared=self.shared, place=self.place, every=self.every)
        )
        found.held = self.held
        return found

    @stage("grams")
    def __call__(self, tap: str, *observed: Any) -> None:
        if tap == "rotated":
            known = f"scores_tokens{self.suffix}" in self.sums
            if self.sampler is not None and (not known or self.sampler.sampled(len(observed[0]))):
                found, count = self.sampler(*observed)
                for name, total in found.items():
                    self._add(f"{name}{self.suffix}", total, count)
                self.count(count, f"scores_tokens{self.suffix}")
            return
        x: Tensor = observed[0]
        tokens = x.shape[0] * x.shape[1] if x.ndim == 4 else x.numel() // x.shape[-1]
        for name in self.readings:
            if READINGS[name][0] == tap:
                self._add(name, READINGS[name][1](x), tokens)
        if tap == "v" and VALUES in self.names:
            self._add(VALUES, head_grams(x * self._root("a").reshape(*x.shape[:2], 1, 1)), tokens)
        for name in self.regressed:
            if REGRESSIONS[name] == tap:
                self._regress(name, rows(x), tokens)

    def _root(self, tap: str) -> Tensor:
        """What rows are multiplied with so that their squares count by their weights: (n, 1)."""
        assert self.goal is not None
        return self.goal.weight(tap).sqrt().reshape(-1, 1)

    def _regress(self, name: str, x: Tensor, tokens: int) -> None:
        assert self.goal is not None
        root = self._root(REGRESSIONS[name])
        x, y = (x * root).to(x.dtype), rows(self.goal.target(REGRESSIONS[name])) * root
        for what, add in (("gram", gram), ("target", lambda x, total: products(x, y, total))):
            key = f"{name}_{what}{self.suffix}"  # added in place: these are the widest sums
            self.sums[key] = add(x, self.sums.get(key))
            self.counts[key] = self.counts.get(key, 0) + tokens
        self._add(f"{name}_energy{self.suffix}", y.square().sum(dtype=torch.float64), tokens)
        self.count(tokens, f"{name}_tokens{self.suffix}")

    def goal_of(self, tokens: Any, target: Tensor, weight: str | None = None) -> Goal:
        """The goal of one expert: its own target for some tokens of the batch, with their weights."""
        assert self.goal is not None
        weights, metric = self.goal.weight, self.goal.metric
        return Goal(
            target=lambda tap: target, weight=lambda tap: weights(weight or tap).flatten()[tokens], metric=metric
        )

    def linearise(
        self, x: Tensor, slopes: dict[str, Tensor], features: Tensor, W_down: Tensor, tokens: Tensor | None = None
    ) -> None:
        """Note how an MLP of features (n, I), of some `tokens` (n,) of the batch, answers to a change of its maps."""
        assert self.goal is not None
        assert self.linearised is not None
        root = self._root("down").to(x.device)
        missing = (rows(self.goal.target("down")) - product(features, W_down)) * root
        each = torch.cat([rows(slopes[name]) for name in MAPS if name in slopes], dim=-1) * root  # (n, N)
        if self.goal.metric is not None:
            metric = self.goal.metric.to(missing)
            # On a GPU in the 16 bits of the inputs: that is how rows are kept.
            missing, W_down = product(missing.to(x.dtype), metric.to(x.dtype)), product(W_down.to(metric), metric)
        self.linearised.append(rows(x), each.to(x.dtype), missing.to(x.dtype), W_down, held=self.held, tokens=tokens)

    def count(self, tokens: int, name: str = OBSERVED) -> None:
        """Note how many tokens were observed."""
        self._add(name, torch.tensor(float(tokens), dtype=torch.float64), 0)

    def _add(self, name: str, value: Tensor, count: int) -> None:
        if name in self.sums:
            self.sums[name] += value
        else:
            self.sums[name] = value
        self.counts[name] = self.counts.get(name, 0) + count

    def means(self, layer: int, *, owner: int | None = None) -> dict[str, Tensor]:
        """Second moments per token, in the place of the sums; an expert's matrices in its `owner` alone."""
        if self.shared:  # other processes' sums, and how many tokens are in them
            names = sorted(self.sums)
            counts = torch.tensor([self.counts[name] for name in names], dtype=torch.int64)
            with stage("share"):
                self.sums = all_reduce(self.sums, owner=owner)
                totals = all_reduce({"counts": counts})["counts"].tolist()
            self.counts = dict(zip(names, totals, strict=True))
        found = {}
        for name in list(self.sums):
            total = self.sums.pop(name)
            # One number that is not finite makes the whole sum so.
            if not total.sum().isfinite():
                instead = "load the model in a wider dtype (--dtype float32), or check the checkpoint"
                raise TrisectError(f"Layer {layer}: the activations behind {name!r} hold NaN or inf; {instead}.")
            found[name] = self._stored(name, total.div_(max(1, self.counts[name])))
        if self.linearised is not None and self.linearised.held:
            refit = self.linearised.moments()  # by all processes together
            found |= refit if owner in (None, rank()) else {}
        for expert, sums in self.experts.items():
            found |= {f"{expert}.{name}": mean for name, mean in sums.means(layer, owner=owner_of(expert)).items()}
        return found

    def _stored(self, name: str, mean: Tensor) -> Tensor:
        """As it is, but a very wide Gram of a regression in main memory, rounded: solving needs the room."""
        wide = mean.numel() > WIDE_GRAM and name.removesuffix("_held") in {f"{gram}_gram" for gram in self.regressed}
        return in_main_memory(mean.float()) if wide else mean


@contextmanager
def recording(view: LayerView, accumulator: Accumulator) -> Iterator[Accumulator]:
    """Collect moments while the layer runs; whatever was attached is taken off again."""

    def hook(tap: str) -> Callable[..., None]:
        return lambda module, args: accumulator(tap, args[0])

    if view.experts is not None:
        handles = observe_experts(view.experts, accumulator) if accumulator.wants_mlp else []
    else:
        names = ("up", "down") if "mlp" in view.components else ()
        handles = [view.module(name).register_forward_pre_hook(hook(name)) for name in names]
        if names and accumulator.linearised is not None:
            part = view.part("mlp")
            assert isinstance(part, MLP)
            W_down = part.W_down
            maps = {name: view.module(name) for name in view.linears() if name in MAPS}
            handles += lift(
                maps,
                view.module("down"),
                lambda x, slopes, features: accumulator.linearise(x, slopes, rows(features), W_down),
                view.columns,
            )
    attention = view.own()
    if attention is not None:
        attention.tap = accumulator
    try:
        with torch.no_grad():
            yield accumulator
    finally:
        if attention is not None:
            attention.tap = None
        for handle in handles:
            handle.remove()


def collect(
    model: nn.Module,
    ids: Tensor,
    reads: Callable[[int], frozenset[str]],
    *,
    batch_size: int | None = None,
    split: bool = False,
    place: str = "auto",
    progress: Progress | None = None,
) -> Iterator[tuple[LayerView, dict[str, Tensor]]]:
    """Yield each layer with its moments; `reads` says which ones a layer needs.

    When a layer is yielded the hidden states are already past it, so it may be rewritten at once and the
    layers after it still see the dense model. With `split`, the processes of a run share the windows.
    """
    windows = in_batches(ids, batch_size=batch_size, split=split)
    stream = Stream.embed(model, layer_views(model), windows.batches, place=place)
    for view in streamed.walk(model):
        with recording(view, Accumulator(reads(view.index), shared=windows.shared)) as accumulator:
            stream.advance(view, progress=progress)
        yield view, accumulator.means(view.index)


# E = experts, k = experts per token


def observe_experts(view: ExpertView, accumulator: Accumulator) -> list[Any]:
    """Hooks that show every expert's own accumulator what its tokens make of it.          [math.md G-1, G-2]"""
    noted: dict[str, Any] = {}
    down = None if view.shared is None else view.shared.down_proj

    def add(module: Any, args: Any, output: Any) -> None:
        missing = None  # what all experts together lack of their target, (n, D)
        if accumulator.goal is not None and (accumulator.regressed or accumulator.linearised):
            target = accumulator.goal.target("down")
            output = output[0] if isinstance(output, tuple) else output
            missing = (target - output.reshape(target.shape)).flatten(0, -2)
        _add_routed(view, accumulator, noted["routed"], missing=missing)
        if down is not None and view.count in accumulator.chosen:
            _add_shared(view, accumulator, noted["shared"], args[0], missing=missing)

    handles = [
        view.module.register_forward_pre_hook(lambda module, args: noted.update(routed=args)),
        view.block.register_forward_hook(add),
    ]
    if down is not None and accumulator.linearised is not None:
        maps = {name: getattr(view.shared, f"{name}_proj") for name in MAPS}
        handles += lift(maps, down, lambda *seen: noted.update(shared=seen), lambda name, slopes: slopes)
    elif down is not None:
        note = down.register_forward_pre_hook(lambda module, args: noted.update(shared=(None, {}, args[0])))
        handles.append(note)
    return handles


def _add_routed(view: ExpertView, accumulator: Accumulator, call: Any, *, missing: Tensor | None) -> None:
    """What the routed experts were called with, seen by each."""
    for number, (tokens, inputs, gate, share) in enumerate(view.routes(*call)):
        if number not in accumulator.chosen:
            continue
        features = view.features(number, inputs) * gate
        own = features @ view.down_weight(number)
        mine = accumulator.expert(f"expert{view.numbers[number]}")
        if missing is not None:
            share = share if view.shared is None or view.paths.apart else share / 2
            mine.goal = accumulator.goal_of(tokens, own + share * missing[tokens])
        if mine.linearised is not None:
            slopes = {name: gate * slope for name, slope in view.slopes(number, inputs).items()}
            mine.linearise(inputs, slopes, features, view.down_weight(number), tokens)
        mine("down", features)
        mine("out", own)
        mine.count(len(tokens))


def _add_shared(view: ExpertView, accumulator: Accumulator, seen: Any, x: Tensor, *, missing: Tensor | None) -> None:
    """The expert that every token passes, and half of what is missing with it."""
    inputs, slopes, features = seen
    given, W_down = view.shared_gate(rows(x)), view.shared.down_proj.weight.mT
    gate: Tensor | float = 1.0 if given is None else given
    features = rows(features) * gate
    mine = accumulator.expert("shared")
    if missing is not None and view.paths.apart:
        assert accumulator.goal is not None
        mine.goal = accumulator.goal_of(slice(None), rows(accumulator.goal.target("shared")), "shared")
    elif missing is not None:
        mine.goal = accumulator.goal_of(slice(None), features @ W_down + missing / 2)
    if mine.linearised is not None:
        slopes = {name: rows(slope) * gate for name, slope in slopes.items()}
        mine.linearise(inputs, slopes, features, W_down)
    mine("down", features)
    mine.count(len(features))
