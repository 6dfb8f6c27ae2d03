"""Where the solvers' statistics come from: the dense model, the narrow model as it grows, or a file.

Each source walks the layers in order. It is asked for the moments of one component at a time, when those
before it are solved and in place, and carries the hidden states on when the layer is finished.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trisect.calibrate import Progress, collect, fisher, fisher_information, linearised, replay, store, streams, texts
from trisect.calibrate.moments import Accumulator, recording
from trisect.config import CompressConfig
from trisect.data import Tokens
from trisect.errors import TrisectError
from trisect.methods import experts, get_method
from trisect.methods.method import ComponentMethod, Method
from trisect.models import LayerView, fingerprint, layer_views, looking, streamed
from trisect.records.parts import LINEARS, METRIC, Slots
from trisect.support import distributed

if TYPE_CHECKING:
    from trisect.pipeline.run import Run

ROTATION = ("rates", "rotary_scaling")
SHARING_WINDOWS = 16  # calibration windows that decide on rotation rates for a whole model
ROOM = 0.5  # share of the free memory that sums of experts may take
NARROW = "narrow_"  # prefix of moments behind the layers cut so far, for methods that read both


class Statistics:
    """Moments of one layer after the other; each source below walks the layers in its own way."""

    def __init__(self, run: "Run"):
        self.run = run
        self.current: dict[str, Tensor] = {}

    def layers(self) -> Iterator[LayerView]:
        """The layers in order, each when its statistics are there."""
        raise NotImplementedError

    def moments(self, view: LayerView, component: str) -> dict[str, Tensor]:
        """What the solver of one component, or linear map, of the current layer reads."""
        return self.current

    def finish(self, view: LayerView) -> None:
        """Carry the hidden states through the layer as it is now."""

    def close(self) -> float | None:
        """What is left to do behind the last layer; gives the factor of the last norm, if there is one."""
        return None

    def reads(self, layer: int) -> frozenset[str]:
        """The moments that a layer's solvers read; none where the layer was finished before."""
        if layer in self.run.ledger.finished:
            return frozenset()
        return frozenset().union(*(self.run.method.reads_for(name) for name in self.run.components(layer)))


class Dense(Statistics):
    """One pass of the dense model serves all components of a layer."""

    def layers(self) -> Iterator[LayerView]:
        run = self.run
        assert run.tokens is not None
        ids, fisher = run.tokens.ids, None
        reads = [self.reads(layer) for layer in range(len(run.shape.layers))]
        if any(name.endswith("_fisher") for names in reads for name in names):
            fisher = fisher_information(run.model, layer_views(run.model, own=True), ids, progress=run.progress)
        forward = [frozenset(name for name in names if not name.endswith("_fisher")) for names in reads]
        how = run.how_to_run
        for view, found in collect(run.model, ids, forward.__getitem__, split=True, progress=run.progress, **how):
            self.current = {**found, **(fisher[view.index] if fisher else {})}
            yield view


class Stored(Statistics):
    """Moments that were collected before."""

    def layers(self) -> Iterator[LayerView]:
        run = self.run
        assert run.moments is not None
        stored = store.load_moments(run.moments, fingerprint=fingerprint(run.model), layers=run.shape.layers)
        for view, (_, statistics) in zip(streamed.walk(run.model), stored, strict=True):
            device = next(view.layer.parameters()).device
            self.current = {name: value.to(device) for name, value in statistics.items()}
            yield view


class Sequential(Statistics):
    """Every moment twice: on the dense stream, and on what the layers cut so far feed the layer."""

    def layers(self) -> Iterator[LayerView]:
        run = self.run
        assert run.tokens is not None
        calibration, views = run.config.calibration, layer_views(run.model, own=True)
        windows = replay.in_batches(run.tokens.ids, batch_size=calibration.batch_size, split=True)
        dense = replay.Stream.embed(run.model, views, windows.batches, place=calibration.states, copies=3)
        self.narrow = dense.copy()
        for view in streamed.walk(run.model):
            names = self.reads(view.index)
            with recording(view, Accumulator(names, shared=windows.shared)) as whole:
                dense.advance(view, progress=run.progress)
            if view.index not in run.ledger.finished:
                with recording(view, Accumulator(names, shared=windows.shared)) as cut:
                    self.narrow.copy().advance(view)
                behind = {f"{NARROW}{name}": value for name, value in cut.means(view.index).items()}
                self.current = {**whole.means(view.index), **behind}
            yield view

    def finish(self, view: LayerView) -> None:
        self.narrow.advance(view)


class Repaired(Statistics):
    """One component after the other on the narrow stream, with the dense stream as target."""

    def layers(self) -> Iterator[LayerView]:
        run = self.run
        assert run.tokens is not None
        assert isinstance(run.method, ComponentMethod)
        self.shared = shared_rotation(run)
        views = layer_views(run.model, own=True)
        self.norm = None if "tail" in run.options.without else streams.last_norm(run.model, views[0].family)
        every = linearised.every_token(run.tokens.ids)
        refitted = [x for number, x in enumerate(run.shape.layers) if experts.REFITS[0] in run.components(number)]
        more = max((linearised.sets_of_states(layer, every) for layer in refitted), default=0)
        ids, how = run.tokens.ids, run.how_to_run
        self.streams = streams.TwoStreams(run.model, views, ids, seed=run.config.seed, split=True, more=more, **how)
        self.metrics = {} if "fisher" in run.options.without else self._metrics(views)
        for view in streamed.walk(run.model):
            narrowed = "qk" in run.components(view.index) and run.width(view, "qk") != view.shape().qk
            names = run.method.slot_reads if narrowed and view.index not in run.ledger.finished else frozenset()
            self.current = self.streams.begin(view, names, progress=run.progress)
            yield view

    def moments(self, view: LayerView, component: str) -> dict[str, Tensor]:
        """For QK with those of the slots that a narrower head might rotate at; none where it is not cut."""
        method, dense = self.run.method, self.current
        if component in experts.ATTENTION_REFITS[:2]:
            return self._attended(view, component)
        slots: tuple[Slots, ...] = ()
        if component == "qk" and dense and isinstance(method, ComponentMethod) and method.slots is not None:
            slots = method.slots(view.part("qk"), dense, self.run.width(view, "qk"), self.run.options, self.shared)
        metric, part = self._metric(view) if component != "qk" else None, experts.STEPS.get(component, component)
        reads = method.reads_for(component)
        statistics: dict[str, Tensor] = {}
        for chosen in experts_at_once(view) if part == "mlp" else [None]:
            statistics |= self.streams.statistics(view, part, reads, slots=slots, metric=metric, chosen=chosen)
        rotation = {name: dense[name] for name in ROTATION if name in dense}
        return {**rotation, **statistics, **({} if metric is None else {METRIC: metric})}

    def _metric(self, view: LayerView) -> Tensor | None:
        metric = self.metrics.get(view.index)
        return None if metric is None else metric.to(next(view.layer.parameters()).device)

    def _attended(self, view: LayerView, component: str) -> dict[str, Tensor]:
        """Of the maps in front of a layer's heads, which are refitted together: one pass for two steps."""
        if component == experts.ATTENTION_REFITS[0]:
            self.attended = self.streams.attention_to_first_order(view, metric=self._metric(view))
            return self.attended
        found, self.attended = self.attended, {}  # of the size of several sets of weights
        return found

    def _metrics(self, views: list[LayerView]) -> dict[int, Tensor]:
        run = self.run
        assert run.tokens is not None
        if set(range(len(views))) <= set(run.ledger.finished) or run.config.parts == ("qk",):
            return {}
        how: Any = {"batch_size": run.config.calibration.batch_size, "seed": run.config.seed}
        return fisher.output_metrics(run.model, views, run.tokens.ids, progress=run.progress, **how)

    def finish(self, view: LayerView) -> None:
        self.streams.finish(view)
        if "streams" in self.run.options.without:
            self.streams.narrow = self.streams.dense.copy()

    def close(self) -> float | None:
        if "tail" in self.run.options.without:
            return None
        return streams.scale_last_norm(self.norm, self.streams)


def experts_at_once(view: LayerView) -> list[range | None]:
    """Experts, by place, whose sums are gathered in one pass over the windows: all of them where there is room."""
    if view.experts is None:
        return [None]
    width, room = view.experts.width, ROOM * streamed.available_bytes(next(view.layer.parameters()).device)
    each = 2 * 8 * width * (width + view.shape().d_model)  # a Gram and a product with targets, fitted and held out
    some = distributed.broadcast(max(1, int(room / each)))
    count = view.experts.count + (view.experts.shared is not None)
    return [range(start, start + some) for start in range(0, count, some)]


def statistics_for(run: "Run") -> Statistics:
    """The source that a run's method reads from."""
    if run.moments is not None:
        return Stored(run)
    return {"dense": Dense, "narrow": Repaired, "both": Sequential}[run.method.streams](run)


def shared_rotation(run: "Run") -> Any:
    """Rotation rates for all layers, from a few windows of the dense model (--rope-scope model)."""
    method = run.method
    assert isinstance(method, ComponentMethod)
    if run.options.rope_scope != "model" or method.share is None or "qk" not in run.config.parts:
        return None
    assert run.tokens is not None
    views = layer_views(run.model, own=True)
    widths = {run.width(view, "qk") for view in views if "qk" in view.components}
    if len(widths) != 1 or run.config.layers is not None:
        needed = "--rope-scope model needs all layers at one query/key width"
        raise TrisectError(f"{needed}; use --allocate uniform and all layers, or --rope-scope layer.")
    ids = run.tokens.ids[:SHARING_WINDOWS]
    both = streams.TwoStreams(run.model, views, ids, seed=run.config.seed, **run.how_to_run)
    layers = [(view, both.begin(view, method.slot_reads)) for view in streamed.walk(run.model)]
    with_pairs = [(view.part("qk"), found) for view, found in layers if "qk" in view.components]
    return method.share(with_pairs, widths.pop(), run.options)


def refuse_stored_moments(method: Method) -> None:
    """Some methods cannot be solved from moments of the dense model."""
    if method.in_order:
        why = f"{method.name} solves each layer behind the layers narrowed before it, which no stored moments can hold"
        raise TrisectError(f"{why}; compress without --moments, or use --method a3.")


def calibrate(
    model: Any,
    config: CompressConfig,
    out: str | Path,
    *,
    tokenizer: Any = None,
    tokens: Tokens | None = None,
    progress: Progress | None = None,
) -> store.MomentsInfo:
    """Collect every moment a method reads and write them to one file."""
    method = get_method(config.method)
    refuse_stored_moments(method)
    looking.check_finite(model)
    config, tokens = texts.with_tokens(model, config, tokens, tokenizer=tokenizer, progress=progress)
    asked = {name for part in config.parts for name in (part, *LINEARS[part])}
    names = frozenset().union(*(reads for name, reads in method.reads.items() if name in asked))
    if any(name.endswith("_fisher") for name in names):
        raise TrisectError(
            f"{method.name} reads gradients, which stored moments do not hold; compress without --moments."
        )
    found = collect(model, tokens.ids, lambda layer: names, progress=progress, **config.calibration.how_to_run)
    layers = {view.index: statistics for view, statistics in found}
    info = store.MomentsInfo(
        fingerprint=fingerprint(model),
        num_layers=len(layers),
        token_hash=tokens.hash,
        source=tokens.source,
        num_tokens=tokens.ids.numel(),
    )
    store.save_moments(out, layers, info)
    return info
