"""`trisect plan`: the widths a goal comes to; `trisect inspect`: the sizes of a model, and what was removed."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from trisect.commands import _screen as screen
from trisect.commands._options import CurvesFile, Json, LoadOptions, Model, TrustRemoteCode, option, verb
from trisect.config import CompressConfig
from trisect.errors import option_name
from trisect.records.shapes import ModelShape


@verb("Compress")
def plan(
    model: Model,
    settings: CompressConfig,
    loading: LoadOptions,
    curves: CurvesFile = None,
    heatmap: Annotated[Path | None, option("Draw the plan, layers by parts: .png or .svg.", "FILE")] = None,
    json: Json = None,
) -> None:
    """Show the widths that a goal comes to; weights are read only to measure loss curves.

    The widths that a quarter less comes to: trisect plan smollm2-135m --ratio 0.25
    Spread by measured losses, drawn as a picture:
        trisect plan smollm2-135m --ratio 0.25 --allocate balanced --curves curves.json --heatmap plan.svg
    What fits 100 million parameters: trisect plan smollm2-135m --target-params 100M
    """
    from trisect.pipeline.job import Job, plan_before_work
    from trisect.report.charts import plan_map
    from trisect.report.terminal import compression_table, heat_tables
    from trisect.support import files, plots

    if heatmap is not None:
        plots.picture_format(heatmap)
        plots.need_matplotlib("leave --heatmap out: the plan is shown as text")
        files.check_writable(heatmap)
    with screen.quiet_libraries(), screen.progress() as report:
        how: Any = {"load_options": asdict(loading), "say": screen.say, "progress": report}
        found = plan_before_work(Job(model=model, config=settings, curves=curves, **how))
    before, after, facts = found.before, found.after, found.facts
    screen.say(found.outlook)
    screen.say(compression_table(before, after), *([] if found.plan.masked else heat_tables(before, after)))
    screen.say(*found.lines)
    if heatmap is not None:
        removed = f"{facts['ratio']:.1%} of the decoder removed"
        title = f"{Path(model).name}: {settings.method}, {facts['allocate']}, {removed}"
        plots.write_figure(heatmap, plan_map(before, after, title=title))
        screen.say(f"Saved to {heatmap}")
    screen.keep_measurement(json, {"model": model, **facts})
    goal = " ".join(f"{option_name(name)} {v}" for name, v in settings.goal.settings().items() if v != "params")
    goal = f"--drop-layers {settings.drop_layers}" if settings.removes_nothing else goal
    screen.say_next(f"trisect compress {screen.quoted(model)} -o OUT {goal}, other options as here")


@verb("Measure")
def inspect(model: Model, json: Json = None, trust_remote_code: TrustRemoteCode = False) -> None:
    """Show a model's widths, parameters, cache and FLOPs; no weights are read.

    What was removed from a model: trisect inspect small
    Its numbers as a file: trisect inspect small --json sizes.json
    """
    from trisect.models import read_shape
    from trisect.plan import budget_of, compare
    from trisect.report.terminal import compression_table

    with screen.quiet_libraries():
        current, original, info = read_shape(model, trust_remote_code=trust_remote_code)
    name, method, packing = screen.quoted(model), info.get("method"), info.get("quantization")
    held = ""
    if packing is not None:
        maps = (f"{count} linear maps in {bits} bits" for bits, count in packing["modules_by_bits"].items())
        held = f"; {', '.join(maps)} ({packing['backend']})"
    screen.say(f"{model}: family {info.get('family')}, {len(current.layers)} layers, method {method or 'none'}" + held)
    screen.say(compression_table(original, current, labels=("original", "now")))
    if info["dropped_layers"]:
        screen.say(f"dropped layers, as they were numbered: {', '.join(map(str, info['dropped_layers']))}")
    for line in info["left_whole"]:
        screen.say(f"left whole: {line}")
    now, was = budget_of(current), budget_of(original)
    facts = {**asdict(now), "ratio": compare(was, now).ratio, "layers": _widths(current)}
    facts["original"] = {**asdict(was), "layers": _widths(original)}
    screen.keep_measurement(json, {"model": model, **facts, **info})
    screen.say_next(f"trisect eval {name}" if method else f"trisect compress {name} -o OUT --ratio 0.25")


def _widths(shape: ModelShape) -> list[dict[str, int]]:
    """Layer by layer; of mixtures also how many experts there are and how many of them a token meets."""
    mixture = ("experts", "top_k", "shared")
    return [
        {name: getattr(layer, name) for name in ("qk", "vo", "mlp", *(mixture if layer.experts else ()))}
        for layer in shape.layers
    ]
