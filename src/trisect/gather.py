"""Statistics for the solvers, round by round: a layer, the components to solve now, and what with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from trisect.calibrate import (
    MomentsInfo,
    Progress,
    Stream,
    TwoStreams,
    collect,
    fisher_information,
    load_moments,
    save_moments,
)
from trisect.calibrate.moments import Accumulator, listening
from trisect.config import CompressConfig
from trisect.data import Tokens, load_tokens
from trisect.errors import TrisectError
from trisect.methods import get_method
from trisect.methods.method import Method, Options
from trisect.models import LayerView, fingerprint, layer_views, shape_of
from trisect.models.check import check_finite, check_tokens
from trisect.parts import COMPONENTS, LINEARS, Slots
from trisect.plan import Plan

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
    progress: Progress | None,
) -> Iterator[Round]:
    """From stored moments, from the dense model, or from the narrow one as it grows."""
    if moments is not None:
        return _stored(model, method, plan, config, moments)
    assert tokens is not None
    if method.repairs:
        return _repaired(model, method, plan, config, tokens, options, progress)
    if method.sequential:
        return _sequential(model, method, plan, config, tokens, progress)
    return _dense(model, method, plan, config, tokens, progress)


def _dense(
    model: Any, method: Method, plan: Plan, config: CompressConfig, tokens: Tokens, progress: Progress | None
) -> Iterator[Round]:
    """All components of a layer at once, on what the dense model computes."""
    views, todo = layer_views(model), work(model, method, plan, config.parts)
    wanted = [frozenset().union(*(method.reads[name] for name in names)) for names in todo]
    fisher = None
    if any(name.endswith("_fisher") for names in wanted for name in names):
        fisher = fisher_information(model, views, tokens.ids, progress=progress)

    def reads(layer: int) -> frozenset[str]:
        return frozenset(name for name in wanted[layer] if not name.endswith("_fisher"))

    batch_size = config.calibration.batch_size
    for view, statistics in collect(model, tokens.ids, reads, batch_size=batch_size, progress=progress):
        yield view, todo[view.index], {**statistics, **(fisher[view.index] if fisher else {})}


def work(model: Any, method: Method, plan: Plan, parts: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Per layer, the components or linear maps that the plan changes."""
    if plan.linears:
        return [tuple(linear.name for linear in layer) for layer in plan.linears]
    layers = zip(plan.layers, shape_of(model).layers, strict=True)
    return [tuple(c for c in parts if widths.of(c) != now.width(c)) for widths, now in layers]


def _sequential(
    model: Any, method: Method, plan: Plan, config: CompressConfig, tokens: Tokens, progress: Progress | None
) -> Iterator[Round]:
    """All components of a layer at once, on the dense stream and on what the layers cut so far feed it."""
    views, todo = layer_views(model), work(model, method, plan, config.parts)
    dense = Stream.embed(model, views, tokens.ids, batch_size=config.calibration.batch_size)
    narrow = Stream(list(dense.hidden), dense.calls)
    for view in views:
        names = frozenset().union(*(method.reads[name] for name in todo[view.index]))
        names = frozenset(name for name in names if not name.startswith(NARROW))
        with listening(view, Accumulator(names)) as whole:
            dense.advance(view, progress=progress)
        with listening(view, Accumulator(names)) as cut:
            Stream(list(narrow.hidden), narrow.calls).advance(view)
        both = {f"{NARROW}{name}": value for name, value in cut.means(view.index).items()}
        yield view, todo[view.index], {**whole.means(view.index), **both}
        narrow.advance(view)


def _repaired(
    model: Any,
    method: Method,
    plan: Plan,
    config: CompressConfig,
    tokens: Tokens,
    options: Options,
    progress: Progress | None,
) -> Iterator[Round]:
    """One component after the other, on what the layers narrowed so far really feed it."""
    views = layer_views(model)
    together = agreed(model, method, plan, config, tokens, options)
    batch_size = config.calibration.batch_size
    streams = TwoStreams(model, views, tokens.ids, batch_size=batch_size, seed=config.seed)
    for view in views:
        cut = config.layers is None or view.index in config.layers
        width = plan.width(view.index, "qk")
        turns = cut and "qk" in config.parts and width != view.shape().qk
        heard = streams.begin(view, method.heard if turns else frozenset(), progress=progress)
        for part in (part for part in COMPONENTS if cut and part in config.parts):
            slots: tuple[Slots, ...] = ()
            if part == "qk" and turns and method.slots is not None:
                slots = method.slots(view.part("qk"), heard, width, options, together)
            statistics = streams.statistics(view, part, method.reads[part], slots=slots)
            yield view, (part,), {**{name: heard[name] for name in ROTATION if name in heard}, **statistics}
        streams.finish(view)
        if "streams" in options.without:
            streams.narrow.hidden = list(streams.dense.hidden)


def agreed(
    model: Any, method: Method, plan: Plan, config: CompressConfig, tokens: Tokens, options: Options
) -> Any:
    """What all layers share before the first is solved: a look at the dense model, on a few windows."""
    if options.rope_scope != "model" or method.share is None or "qk" not in config.parts:
        return None
    views = layer_views(model)
    widths = {plan.width(view.index, "qk") for view in views}
    if len(widths) != 1 or config.layers is not None:
        raise TrisectError(
            "--rope-scope model needs all layers at one query/key width; use --allocate uniform and all "
            "layers, or --rope-scope layer."
        )
    ids = tokens.ids[:SHARING_WINDOWS]
    streams = TwoStreams(model, views, ids, batch_size=config.calibration.batch_size, seed=config.seed)
    heard = [(view.part("qk"), streams.begin(view, method.heard)) for view in views]
    return method.share(heard, widths.pop(), options)


def _stored(
    model: Any, method: Method, plan: Plan, config: CompressConfig, path: str | Path
) -> Iterator[Round]:
    """All components of a layer at once, from moments collected before."""
    refuse_stored_moments(method)
    views, todo = layer_views(model), work(model, method, plan, config.parts)
    for layer, statistics in load_moments(path, fingerprint=fingerprint(model)):
        device = next(views[layer].layer.parameters()).device
        yield views[layer], todo[layer], {name: value.to(device) for name, value in statistics.items()}


def calibrate(
    model: Any,
    config: CompressConfig,
    out: str | Path,
    *,
    tokenizer: Any = None,
    tokens: Tokens | None = None,
    progress: Progress | None = None,
) -> MomentsInfo:
    """Collect every moment a method reads and write them to one file, to be cut at any ratio later."""
    method = get_method(config.method)
    refuse_stored_moments(method)
    check_finite(model)
    tokens = tokens or calibration_tokens(config, tokenizer)
    check_tokens(model, tokens.ids)
    names = frozenset().union(*(reads for name, reads in method.reads.items() if _within(name, config.parts)))
    if any(name.endswith("_fisher") for name in names):
        raise TrisectError(
            f"{method.name} reads gradients, which stored moments do not hold; compress without --moments."
        )
    batch_size = config.calibration.batch_size
    found = collect(model, tokens.ids, lambda layer: names, batch_size=batch_size, progress=progress)
    layers = {view.index: statistics for view, statistics in found}
    info = MomentsInfo(
        fingerprint=fingerprint(model),
        num_layers=len(layers),
        token_hash=tokens.hash,
        source=tokens.source,
        num_tokens=tokens.ids.numel(),
    )
    save_moments(out, layers, info)
    return info


def _within(name: str, parts: tuple[str, ...]) -> bool:
    """Whether a component or linear map belongs to the parts asked for."""
    return any(name == part or name in LINEARS[part] for part in parts)


def calibration_tokens(config: CompressConfig, tokenizer: Any) -> Tokens:
    """The tokens a config asks to calibrate on."""
    c = config.calibration
    return load_tokens(
        c.source,
        tokenizer,
        samples=c.samples,
        length=c.length,
        sampling=c.sampling,
        seed=c.seed,
        split="calibration",
    )


def refuse_stored_moments(method: Method) -> None:
    """Some methods cannot be solved from moments of the dense model."""
    if method.repairs or method.sequential:
        raise TrisectError(
            f"{method.name} solves each layer on what the layers narrowed before it put out, which no stored "
            "moments can hold; compress without --moments, or use --method a3."
        )
