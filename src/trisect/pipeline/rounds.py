"""Statistics for the solvers, round by round: a layer, the components to solve now, and what with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from trisect.calibrate import Progress, Stream, TwoStreams, collect, fisher_information, load_moments
from trisect.calibrate.moments import Accumulator, listening
from trisect.calibrate.replay import in_batches
from trisect.calibrate.streams import last_norm, scale_last_norm
from trisect.config import CompressConfig
from trisect.data import Tokens
from trisect.errors import TrisectError
from trisect.methods.method import Method, Options
from trisect.models import LayerView, fingerprint, layer_views, shape_of
from trisect.models.streamed import walk
from trisect.pipeline.resume import Ledger
from trisect.pipeline.stored_moments import how_to_run, refuse_stored_moments
from trisect.plan import Plan
from trisect.records.parts import COMPONENTS, Slots

Round = tuple[LayerView, tuple[str, ...], dict[str, Tensor]]

ROTATION = ("rates", "rotary_scaling")
SHARING_WINDOWS = 16
"""Calibration windows that decide on rotation rates for a whole model."""

NARROW = "narrow_"
"""Prefix of moments behind the layers cut so far, for methods that read both."""


def rounds(
    model: Any,
    method: Method,
    plan: Plan,
    config: CompressConfig,
    *,
    tokens: Tokens | None,
    moments: str | Path | None,
    options: Options,
    ledger: Ledger | None = None,
    progress: Progress | None,
) -> Iterator[Round]:
    """From stored moments, from the dense model, or from the narrow one as it grows.

    Layers that the ledger has already are put in place and not yielded; the others are kept there.
    """
    ledger = ledger or Ledger(getattr(model, "layer_store", None))
    if moments is not None:
        return _stored(model, method, plan, config, moments, ledger)
    assert tokens is not None
    if method.repairs:
        return _repaired(model, method, plan, config, tokens, options, ledger, progress)
    if method.sequential:
        return _sequential(model, method, plan, config, tokens, ledger, progress)
    return _dense(model, method, plan, config, tokens, ledger, progress)


def _dense(
    model: Any,
    method: Method,
    plan: Plan,
    config: CompressConfig,
    tokens: Tokens,
    ledger: Ledger,
    progress: Progress | None,
) -> Iterator[Round]:
    """All components of a layer at once, on what the dense model computes."""
    views, todo = layer_views(model, own=True), work(model, method, plan, config.parts)
    wanted = [frozenset().union(*(method.reads[name] for name in names)) for names in todo]
    fisher = None
    if any(name.endswith("_fisher") for names in wanted for name in names):
        fisher = fisher_information(model, views, tokens.ids, progress=progress)

    def reads(layer: int) -> frozenset[str]:
        if ledger.has(layer):
            return frozenset()
        return frozenset(name for name in wanted[layer] if not name.endswith("_fisher"))

    found = collect(model, tokens.ids, reads, split=True, progress=progress, **how_to_run(config))
    for view, statistics in found:
        if ledger.has(view.index):
            ledger.restore(view)
        else:
            yield view, todo[view.index], {**statistics, **(fisher[view.index] if fisher else {})}
            ledger.keep(view)


def work(model: Any, method: Method, plan: Plan, parts: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Per layer, the components or linear maps that the plan changes."""
    if plan.linears:
        return [tuple(linear.name for linear in layer) for layer in plan.linears]
    layers = zip(plan.layers, shape_of(model).layers, strict=True)
    return [tuple(c for c in parts if widths.of(c) != now.width(c)) for widths, now in layers]


def _sequential(
    model: Any,
    method: Method,
    plan: Plan,
    config: CompressConfig,
    tokens: Tokens,
    ledger: Ledger,
    progress: Progress | None,
) -> Iterator[Round]:
    """All components of a layer at once, on the dense stream and on what the layers cut so far feed it."""
    todo = work(model, method, plan, config.parts)
    windows = in_batches(tokens.ids, batch_size=config.calibration.batch_size, split=True)
    place = config.calibration.states
    dense = Stream.embed(model, layer_views(model), windows.batches, place=place, copies=3)
    narrow = dense.copy()
    for view in walk(model):
        names = frozenset().union(*(method.reads[name] for name in todo[view.index]))
        names = frozenset(name for name in names if not name.startswith(NARROW))
        with listening(view, Accumulator(names, shared=windows.shared)) as whole:
            dense.advance(view, progress=progress)
        if ledger.has(view.index):
            ledger.restore(view)
        else:
            with listening(view, Accumulator(names, shared=windows.shared)) as cut:
                narrow.copy().advance(view)
            both = {f"{NARROW}{name}": value for name, value in cut.means(view.index).items()}
            yield view, todo[view.index], {**whole.means(view.index), **both}
            ledger.keep(view)
        narrow.advance(view)


def _repaired(
    model: Any,
    method: Method,
    plan: Plan,
    config: CompressConfig,
    tokens: Tokens,
    options: Options,
    ledger: Ledger,
    progress: Progress | None,
) -> Iterator[Round]:
    """One component after the other, on what the layers narrowed so far really feed it."""
    together = agreed(model, method, plan, config, tokens, options)
    views = layer_views(model, own=True)
    norm = None if "tail" in options.without else last_norm(model, views[0].family)
    streams = TwoStreams(model, views, tokens.ids, seed=config.seed, split=True, **how_to_run(config))
    for view in walk(model):
        if ledger.has(view.index):
            streams.begin(view, progress=progress)
            ledger.restore(view)
            _go_on(streams, view, options)
            continue
        cut = config.layers is None or view.index in config.layers
        width = plan.width(view.index, "qk")
        turns = cut and "qk" in config.parts and width != view.shape().qk
        heard = streams.begin(view, method.heard if turns else frozenset(), progress=progress)
        for part in (part for part in COMPONENTS if cut and part in config.parts):
            yield (
                view,
                (part,),
                turned_statistics(streams, view, part, method, heard, width, options, together),
            )
        ledger.keep(view)
        _go_on(streams, view, options)
    if "tail" not in options.without:
        ledger.last_norm_scale = scale_last_norm(norm, streams)


def turned_statistics(
    streams: TwoStreams,
    view: LayerView,
    part: str,
    method: Method,
    heard: dict[str, Tensor],
    width: int,
    options: Options,
    together: Any = None,
) -> dict[str, Tensor]:
    """Moments on the narrow stream; for QK with those of the slots that a head of `width` might turn at.

    `heard` are moments of the dense layer, empty where QK is not cut.
    """
    slots: tuple[Slots, ...] = ()
    if part == "qk" and heard and method.slots is not None:
        slots = method.slots(view.part("qk"), heard, width, options, together)
    statistics = streams.statistics(view, part, method.reads[part], slots=slots)
    return {**{name: heard[name] for name in ROTATION if name in heard}, **statistics}


def _go_on(streams: TwoStreams, view: LayerView, options: Options) -> None:
    """To the next layer, with the hidden states that the narrow one feeds it."""
    streams.finish(view)
    if "streams" in options.without:
        streams.narrow = streams.dense.copy()


def agreed(
    model: Any, method: Method, plan: Plan, config: CompressConfig, tokens: Tokens, options: Options
) -> Any:
    """What all layers share before the first is solved: a look at the dense model, on a few windows."""
    if options.rope_scope != "model" or method.share is None or "qk" not in config.parts:
        return None
    views = layer_views(model, own=True)
    widths = {plan.width(view.index, "qk") for view in views}
    if len(widths) != 1 or config.layers is not None:
        raise TrisectError(
            "--rope-scope model needs all layers at one query/key width; use --allocate uniform and all "
            "layers, or --rope-scope layer."
        )
    ids = tokens.ids[:SHARING_WINDOWS]
    streams = TwoStreams(model, views, ids, seed=config.seed, **how_to_run(config))
    heard = [(view.part("qk"), streams.begin(view, method.heard)) for view in walk(model)]
    return method.share(heard, widths.pop(), options)


def _stored(
    model: Any, method: Method, plan: Plan, config: CompressConfig, path: str | Path, ledger: Ledger
) -> Iterator[Round]:
    """All components of a layer at once, from moments collected before."""
    refuse_stored_moments(method)
    todo = work(model, method, plan, config.parts)
    stored = load_moments(path, fingerprint=fingerprint(model), layers=shape_of(model).layers)
    for view, (_, statistics) in zip(walk(model), stored, strict=True):
        if ledger.has(view.index):
            ledger.restore(view)
            continue
        device = next(view.layer.parameters()).device
        yield view, todo[view.index], {name: value.to(device) for name, value in statistics.items()}
        ledger.keep(view)
