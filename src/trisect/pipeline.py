"""The whole flow on one screen: load -> calibrate -> plan -> solve -> rewrite."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from trisect.calibrate import (
    MomentsInfo,
    Progress,
    TwoStreams,
    collect,
    load_moments,
    read_info,
    save_moments,
)
from trisect.config import CompressConfig
from trisect.curves import measure_curves
from trisect.data import Tokens, load_tokens
from trisect.errors import TrisectError
from trisect.files import write_json
from trisect.methods import METHODS, get_method, solve
from trisect.methods.method import Method, Options
from trisect.models import (
    LayerView,
    fingerprint,
    layer_views,
    mark_compressed,
    original_widths,
    shape_of,
)
from trisect.models.check import check_finite, check_tokens
from trisect.parts import COMPONENTS
from trisect.plan import Curves, Plan, balanced_plan, read_curves, uniform_plan
from trisect.receipt import build_receipt
from trisect.shapes import ModelShape, widths_of


@dataclass(frozen=True, kw_only=True)
class Compressed:
    model: Any
    plan: Plan
    losses: list[dict[str, Any]]
    """One entry per layer and component: width, predicted loss, its share of the whole, notes."""
    receipt: dict[str, Any]


def compress(
    model: Any,
    config: CompressConfig,
    *,
    tokenizer: Any = None,
    tokens: Tokens | None = None,
    moments: str | Path | None = None,
    curves: str | Path | None = None,
    progress: Progress | None = None,
) -> Compressed:
    """Compress a model in place and say what it cost.

    Statistics come from `moments` if given, else from `tokens`, else from `config.calibration`. With
    `allocate="balanced"`, loss curves are read from the file `curves`, or measured and written there.
    """
    started = time.perf_counter()
    method = get_method(config.method)
    check_finite(model)
    original = original_widths(model)
    if moments is None:
        tokens = tokens or calibration_tokens(config, tokenizer)
        check_tokens(model, tokens.ids)
    plan = plan_for(shape_of(model), config, _curves(model, config, tokens, curves, progress))
    if moments is not None:
        _refuse_stored_moments(method)
        rounds, token_hash = _stored(model, config, moments), read_info(moments).token_hash
    else:
        assert tokens is not None
        gather = _repaired if method.repairs else _dense
        rounds, token_hash = gather(model, method, plan, config, tokens, progress), tokens.hash

    options = Options(qk_norm_tolerance=config.qk_norm_tolerance)
    losses = []
    for view, components, statistics in rounds:
        for component in components:
            width = plan.layers[view.index].of(component)
            solution = solve(
                method, component, view.part(component), statistics, width=width, options=options
            )
            view.write(solution.part)
            losses.append(_loss_entry(view.index, component, width, solution))

    mark_compressed(model, original=original, method=config.method, ratio=config.ratio)
    plan = replace(plan, layers=tuple(widths_of(view.shape()) for view in layer_views(model)))
    receipt = build_receipt(
        config.to_dict(),
        seed=config.seed,
        token_hash=token_hash,
        timings={"compress": time.perf_counter() - started},
    )
    receipt = {**receipt, "plan": plan.to_dict(), "losses": losses}
    model.receipt = receipt
    return Compressed(model=model, plan=plan, losses=losses, receipt=receipt)


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
    _refuse_stored_moments(method)
    check_finite(model)
    tokens = tokens or calibration_tokens(config, tokenizer)
    check_tokens(model, tokens.ids)
    names = frozenset().union(*(method.reads[part] for part in config.parts))
    layers = {
        view.index: statistics
        for view, statistics in collect(
            model,
            tokens.ids,
            lambda layer: names,
            batch_size=config.calibration.batch_size,
            progress=progress,
        )
    }
    info = MomentsInfo(
        fingerprint=fingerprint(model),
        num_layers=len(layers),
        token_hash=tokens.hash,
        source=tokens.source,
        num_tokens=tokens.ids.numel(),
    )
    save_moments(out, layers, info)
    return info


def plan_for(shape: ModelShape, config: CompressConfig, curves: Curves | None = None) -> Plan:
    """The widths a config asks for."""
    if config.allocate == "balanced":
        if curves is None:
            raise TrisectError("A balanced plan needs measured loss curves: name their file with --curves.")
        return balanced_plan(
            shape,
            curves,
            ratio=config.ratio,
            parts=config.parts,
            layers=config.layers,
            align=config.align,
            method=config.method,
        )
    return uniform_plan(
        shape,
        ratio=config.ratio,
        parts=config.parts,
        layers=config.layers,
        align=config.align,
        method=config.method,
    )


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


def _curves(
    model: Any,
    config: CompressConfig,
    tokens: Tokens | None,
    path: str | Path | None,
    progress: Progress | None,
) -> Curves | None:
    """The loss curves a balanced plan needs: from their file where there is one, else measured."""
    if config.allocate != "balanced":
        return None
    if path is not None and Path(path).exists():
        return read_curves(path, fingerprint=fingerprint(model))
    if tokens is None:
        raise TrisectError("Loss curves are measured on tokens, not on moments; leave --moments out.")
    curves = measure_curves(
        model,
        tokens,
        METHODS["a3+"],
        parts=config.parts,
        options=Options(qk_norm_tolerance=config.qk_norm_tolerance),
        batch_size=config.calibration.batch_size,
        seed=config.seed,
        progress=progress,
    )
    if path is not None:
        write_json(path, curves.to_dict())
    return curves


Round = tuple[LayerView, tuple[str, ...], dict[str, Tensor]]
"""A layer, the components to solve now, and the statistics to solve them with."""


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
    model: Any, method: Method, plan: Plan, config: CompressConfig, tokens: Tokens, progress: Progress | None
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


def _stored(model: Any, config: CompressConfig, path: str | Path) -> Iterator[Round]:
    """All components of a layer at once, from moments collected before."""
    views = layer_views(model)
    for layer, statistics in load_moments(path, fingerprint=fingerprint(model)):
        yield views[layer], config.parts, statistics


def _refuse_stored_moments(method: Method) -> None:
    if method.repairs:
        raise TrisectError(
            f"{method.name} solves each layer on what the layers narrowed before it put out, which no stored "
            "moments can hold; compress without --moments, or use --method a3."
        )


def _loss_entry(layer: int, component: str, width: int, solution: Any) -> dict[str, Any]:
    return {
        "layer": layer,
        "component": component,
        "width": width,
        "loss": solution.loss,
        "total": solution.total,
        "clipped": solution.clipped,
        "note": solution.note,
    }
