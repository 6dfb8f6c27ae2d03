"""Statistics for the solvers, round by round: a layer, the components to solve now, and what with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from trisect.calibrate import (
    MomentsInfo,
    Progress,
    TwoStreams,
    collect,
    load_moments,
    save_moments,
)
from trisect.config import CompressConfig
from trisect.data import Tokens, load_tokens
from trisect.errors import TrisectError
from trisect.methods import get_method
from trisect.methods.method import Method
from trisect.models import LayerView, fingerprint, layer_views, shape_of
from trisect.models.check import check_finite, check_tokens
from trisect.parts import COMPONENTS
from trisect.plan import Plan

Round = tuple[LayerView, tuple[str, ...], dict[str, Tensor]]


def rounds(
    model: Any,
    method: Method,
    plan: Plan,
    config: CompressConfig,
    *,
    tokens: Tokens | None,
    moments: str | Path | None,
    progress: Progress | None,
) -> Iterator[Round]:
    """From stored moments, from the dense model, or from the narrow one as it grows."""
    if moments is not None:
        return _stored(model, method, config, moments)
    assert tokens is not None
    if method.repairs:
        return _repaired(model, method, config, tokens, progress)
    return _dense(model, method, plan, config, tokens, progress)


def _dense(
    model: Any, method: Method, plan: Plan, config: CompressConfig, tokens: Tokens, progress: Progress | None
) -> Iterator[Round]:
    """All components of a layer at once, on what the dense model computes."""
    shape = shape_of(model)

    def reads(layer: int) -> frozenset[str]:
        widths, now = plan.layers[layer], shape.layers[layer]
        narrowed = [part for part in config.parts if widths.of(part) != now.width(part)]
        return frozenset().union(*(method.reads[part] for part in narrowed))

    batch_size = config.calibration.batch_size
    for view, statistics in collect(model, tokens.ids, reads, batch_size=batch_size, progress=progress):
        yield view, config.parts, statistics


def _repaired(
    model: Any, method: Method, config: CompressConfig, tokens: Tokens, progress: Progress | None
) -> Iterator[Round]:
    """One component after the other, on what the layers narrowed so far really feed it."""
    views = layer_views(model)
    batch_size = config.calibration.batch_size
    streams = TwoStreams(model, views, tokens.ids, batch_size=batch_size, seed=config.seed)
    for view in views:
        streams.begin(view, progress=progress)
        if config.layers is None or view.index in config.layers:
            for part in (part for part in COMPONENTS if part in config.parts):
                yield view, (part,), streams.statistics(view, part, method.reads[part])
        streams.finish(view)


def _stored(model: Any, method: Method, config: CompressConfig, path: str | Path) -> Iterator[Round]:
    """All components of a layer at once, from moments collected before."""
    refuse_stored_moments(method)
    views = layer_views(model)
    for layer, statistics in load_moments(path, fingerprint=fingerprint(model)):
        yield views[layer], config.parts, statistics


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
    names = frozenset().union(*(method.reads[part] for part in config.parts))
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
    if method.repairs:
        raise TrisectError(
            f"{method.name} solves each layer on what the layers narrowed before it put out, which no stored "
            "moments can hold; compress without --moments, or use --method a3."
        )
