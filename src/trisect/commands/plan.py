"""`trisect plan`: the widths a goal comes to, before anything is compressed."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trisect.commands import _screen as screen
from trisect.commands._options import CurvesFile, Json, LoadOptions, Model, option
from trisect.config import CompressConfig
from trisect.errors import TrisectError, option_name

if TYPE_CHECKING:
    from trisect.plan import Curves, Plan
    from trisect.records.shapes import ModelShape

PANEL = "Compress"
EXAMPLES = (
    ("The widths that a quarter less comes to", "trisect plan smollm2-135m --ratio 0.25"),
    (
        "Spread by measured losses, drawn as a picture",
        "trisect plan smollm2-135m --ratio 0.25 --allocate balanced --curves curves.json --heatmap plan.svg",
    ),
    ("What fits 100 million parameters", "trisect plan smollm2-135m --target-params 100M"),
)


def run(
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
    from trisect.methods.method import options_of
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
    method = options_of(config)
    with screen.progress() as report:
        return curves_for(loaded.model, config, prepared.tokens, options=method, path=path, progress=report)


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
