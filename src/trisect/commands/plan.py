"""`trisect plan`: the widths a goal comes to, before anything is compressed."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trisect.commands import _options as options
from trisect.config import CompressConfig
from trisect.errors import TrisectError

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
    model: options.Model,
    settings: CompressConfig,
    curves: options.Curves = None,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    heatmap: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the plan, layers by parts: .png or .svg.")
    ] = None,
    json: options.Json = None,
    quiet: options.Quiet = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Show the widths that a goal comes to; weights are read only to measure loss curves."""
    show_plan(
        model,
        settings,
        curves=curves,
        heatmap=heatmap,
        json=json,
        quiet=quiet,
        load_options={"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code},
    )


def show_plan(
    model: str,
    config: CompressConfig,
    *,
    curves: Path | None,
    heatmap: Path | None = None,
    json: Path | None,
    quiet: bool,
    load_options: dict[str, Any],
) -> None:
    """Plan from the model's configuration alone, and from loss curves where the allocation needs them."""
    from trisect.commands._screen import keep_measurement, quiet_libraries, quoted, say_next, stdout
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
    with quiet_libraries():
        shape, _, _ = read_shape(model, trust_remote_code=load_options["trust_remote_code"])
    known = _curves(model, config, curves, load_options=load_options, quiet=quiet)
    plan = plan_from_shape(shape, config, known)
    after = apply_plan(shape, plan)
    facts = describe(shape, config, plan, known)
    console = stdout()
    console.print(str(outlook(shape, config, plan)), soft_wrap=True)
    console.print(compression_table(shape, after))
    if not plan.masked:
        for table in heat_tables(shape, after):
            console.print(table)
    for line in _lines(facts):
        console.print(line, soft_wrap=True)
    if heatmap is not None:
        removed = f"{facts['ratio']:.1%} of the decoder removed"
        title = f"{Path(model).name}: {config.method}, {config.allocate}, {removed}"
        write_figure(heatmap, plan_map(shape, after, title=title))
    keep_measurement(json, {"model": model, **facts})
    say_next(f"trisect compress {quoted(model)} -o OUT {_goal_options(config)}, other options as here", quiet=quiet)


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


def _curves(
    model: str, config: CompressConfig, path: Path | None, *, load_options: dict[str, Any], quiet: bool
) -> "Curves | None":
    """From their file; one that does not exist yet is measured and written, as `compress` does."""
    from trisect.calibrate.texts import prepare
    from trisect.commands._screen import load, progress, say
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
    loaded = load(model, **load_options)
    options = options_of(config)
    with progress(quiet=quiet) as report:
        prepared = prepare(loaded.model, config, loaded.tokenizer, progress=report)
    for line in (prepared.line(), *prepared.notes):
        say(line)
    tokens = prepared.tokens
    with progress(quiet=quiet) as report:
        return curves_for(loaded.model, config, tokens, options=options, path=path, progress=report)


def _lines(facts: dict[str, Any]) -> list[str]:
    from trisect.plan.outlook import UNITS

    budget, rise = facts["budget"], facts["predicted_rise"]
    allowed = "" if budget["allowed"] is None else f", {budget['allowed']:,} asked for"
    lines = [f"{UNITS[budget['unit']]}: {budget['planned']:,} planned{allowed}, {budget['before']:,} before"]
    if rise is not None and math.isfinite(rise):
        factor = f"perplexity x{math.exp(rise):.3f}"
        lines.append(f"predicted from the curves: {factor} (+{rise:.4f} nats per token)")
    elif rise is not None:
        lines.append("predicted from the curves: nothing, the plan goes below them")
    return lines


def _goal_options(config: CompressConfig) -> str:
    """The goal as it is typed."""
    from trisect.errors import option_name

    return " ".join(
        f"{option_name(name)} {value}" for name, value in config.goal.settings().items() if value != "params"
    )
