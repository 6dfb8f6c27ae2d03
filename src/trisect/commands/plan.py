"""`trisect plan`: the widths a goal comes to; `trisect inspect`: the sizes of a model, and what was removed."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trisect.commands import _screen as screen
from trisect.commands._options import CurvesFile, Json, LoadOptions, Model, TrustRemoteCode, Verb, option
from trisect.config import CompressConfig
from trisect.errors import TrisectError, option_name

if TYPE_CHECKING:
    from trisect.plan import Curves, Plan
    from trisect.records.shapes import ModelShape


def plan(
    model: Model,
    settings: CompressConfig,
    loading: LoadOptions,
    curves: CurvesFile = None,
    heatmap: Annotated[Path | None, option("Draw the plan, layers by parts: .png or .svg.", "FILE")] = None,
    json: Json = None,
) -> None:
    """Show the widths that a goal comes to; weights are read only to measure loss curves."""
    show_plan(model, settings, loading, curves=curves, heatmap=heatmap, json=json)


def show_plan(
    model: str,
    config: CompressConfig,
    loading: LoadOptions,
    *,
    curves: Path | None,
    heatmap: Path | None = None,
    json: Path | None,
) -> None:
    """Plan from the model's configuration alone, and from loss curves where the allocation needs them."""
    from trisect.models import read_shape
    from trisect.pipeline.run import plan_from_shape, with_method_defaults
    from trisect.plan import apply_plan, outlook
    from trisect.report.charts import plan_map
    from trisect.report.terminal import compression_table, heat_tables
    from trisect.support.files import check_writable
    from trisect.support.plots import need_matplotlib, picture_format, write_figure

    config = with_method_defaults(config)
    if heatmap is not None:
        picture_format(heatmap)
        need_matplotlib("leave --heatmap out: the plan is shown as text")
        check_writable(heatmap)
    with screen.quiet_libraries():
        shape, _, _ = read_shape(model, trust_remote_code=loading.trust_remote_code)
    known = _curves(model, config, curves, loading)
    plan = plan_from_shape(shape, config, known)
    after, facts = apply_plan(shape, plan), describe(shape, config, plan, known)
    screen.say(str(outlook(shape, config, plan)))
    screen.say(compression_table(shape, after), *([] if plan.masked else heat_tables(shape, after)))
    screen.say(*_lines(facts))
    if heatmap is not None:
        removed = f"{facts['ratio']:.1%} of the decoder removed"
        title = f"{Path(model).name}: {config.method}, {config.allocate}, {removed}"
        write_figure(heatmap, plan_map(shape, after, title=title))
    screen.keep_measurement(json, {"model": model, **facts})
    goal = " ".join(f"{option_name(name)} {v}" for name, v in config.goal.settings().items() if v != "params")
    screen.say_next(f"trisect compress {screen.quoted(model)} -o OUT {goal}, other options as here")


def describe(shape: "ModelShape", config: CompressConfig, plan: "Plan", curves: "Curves | None") -> dict[str, Any]:
    """What a plan comes to, for people and for JSON."""
    from trisect.plan import apply_plan, budget_of, compare, outlook

    old, new = budget_of(shape), budget_of(apply_plan(shape, plan))
    return {
        **compare(old, new).to_dict(),
        "before": old.to_dict(),
        "after": new.to_dict(),
        "plan": plan.to_dict(),
        "allocate": config.allocate,
        "budget": outlook(shape, config, plan).counts(),
        "predicted_rise": None if curves is None else curves.rise(shape, plan),
    }


def _curves(model: str, config: CompressConfig, path: Path | None, loading: LoadOptions) -> "Curves | None":
    """From their file; one that does not exist yet is measured and written, as `compress` does."""
    from trisect.calibrate.texts import prepare
    from trisect.methods import get_method
    from trisect.pipeline.loss_curves import curves_for
    from trisect.plan import read_curves
    from trisect.plan.allocate import CURVED
    from trisect.support.files import check_writable

    if path is None or get_method(config.method).linear:  # ranks of linear maps have no use for curves
        return None
    if path.exists():
        return read_curves(path)
    if config.allocate not in CURVED:
        raise TrisectError(
            f"There are no loss curves at {path}; --allocate search or balanced measures and writes them."
        )
    check_writable(path)
    loaded = screen.load(model, loading)
    with screen.progress() as report:
        prepared = prepare(loaded.model, config, loaded.tokenizer, progress=report)
    screen.say(prepared.line(), *prepared.notes)
    with screen.progress() as report:
        return curves_for(loaded.model, config, prepared.tokens, path=path, progress=report)


def _lines(facts: dict[str, Any]) -> list[str]:
    from trisect.plan.problem import UNITS

    budget, rise = facts["budget"], facts["predicted_rise"]
    allowed = "" if budget["allowed"] is None else f", {budget['allowed']:,} asked for"
    lines = [f"{UNITS[budget['unit']]}: {budget['planned']:,} planned{allowed}, {budget['before']:,} before"]
    if rise is not None and math.isfinite(rise):
        factor = f"perplexity x{math.exp(rise):.3f}"
        lines.append(f"predicted from the curves: {factor} (+{rise:.4f} nats per token)")
    elif rise is not None:
        lines.append("predicted from the curves: nothing, the plan goes below them")
    return lines


def inspect(model: Model, json: Json = None, trust_remote_code: TrustRemoteCode = False) -> None:
    """Show a model's widths, parameters, cache and FLOPs; no weights are read."""
    from trisect.models import read_shape
    from trisect.report.terminal import compression_table

    with screen.quiet_libraries():
        current, original, info = read_shape(model, trust_remote_code=trust_remote_code)
    name, method = screen.quoted(model), info.get("method")
    screen.say(
        f"{model}: family {info.get('family')}, {len(current.layers)} layers, method {method or 'none'}"
        + quantised(info.get("quantization"))
    )
    screen.say(compression_table(original, current, labels=("original", "now")))
    for line in info["left_whole"]:
        screen.say(f"left whole: {line}")
    screen.keep_measurement(json, {"model": model, **describe_sizes(current, original), **info})
    screen.say_next(f"trisect eval {name}" if method else f"trisect compress {name} -o OUT --ratio 0.25")


def quantised(packing: dict[str, Any] | None) -> str:
    """The end of the first line: in how many bits the linear maps are held."""
    if packing is None:
        return ""
    held = ", ".join(f"{count} linear maps in {bits} bits" for bits, count in packing["modules_by_bits"].items())
    return f"; {held} ({packing['backend']})"


def describe_sizes(current: "ModelShape", original: "ModelShape") -> dict[str, Any]:
    """The measurement: this model's numbers, and the original's under their own key."""
    from trisect.plan import budget_of, compare

    now, was = budget_of(current), budget_of(original)
    return {
        **now.to_dict(),
        "ratio": compare(was, now).ratio,
        "layers": _widths(current),
        "original": {**was.to_dict(), "layers": _widths(original)},
    }


def _widths(shape: "ModelShape") -> list[dict[str, int]]:
    """Layer by layer; of mixtures also how many experts there are and how many of them a token meets."""
    mixture = ("experts", "top_k", "shared")
    return [
        {name: getattr(layer, name) for name in ("qk", "vo", "mlp", *(mixture if layer.experts else ()))}
        for layer in shape.layers
    ]


VERBS = {
    "plan": Verb(
        plan,
        "Compress",
        (
            ("The widths that a quarter less comes to", "trisect plan smollm2-135m --ratio 0.25"),
            (
                "Spread by measured losses, drawn as a picture",
                "trisect plan smollm2-135m --ratio 0.25 --allocate balanced --curves curves.json --heatmap plan.svg",
            ),
            ("What fits 100 million parameters", "trisect plan smollm2-135m --target-params 100M"),
        ),
    ),
    "inspect": Verb(
        inspect,
        "Measure",
        (
            ("What was removed from a model", "trisect inspect small"),
            ("Its numbers as a file", "trisect inspect small --json sizes.json"),
        ),
    ),
}
