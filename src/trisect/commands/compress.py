"""Compress: `trisect compress` narrows a model, `plan` shows what it would; `calibrate` and `sample` go before."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from trisect.commands import _screen as screen
from trisect.commands._options import NEW_FOLDER, CurvesFile, Json, LoadOptions, Model, option, verb
from trisect.config import CalibrationConfig, CompressConfig, verbs
from trisect.config.settings import CUT, RUNNING
from trisect.errors import TrisectError, option_name
from trisect.support import files


@verb("Compress")
def compress(
    model: Model,
    settings: CompressConfig,
    loading: LoadOptions,
    out: Annotated[Path | None, option(NEW_FOLDER, "DIR")] = None,
    stream: Annotated[str, option("One layer at a time; auto: if need be.", "auto|on|off", panel=RUNNING)] = "auto",
    fast: Annotated[bool, option("The paper's method, a3: faster, less accurate.", panel=CUT)] = False,
    best: Annotated[bool, option("--allocate balanced --refine: slower, more accurate.", panel=CUT)] = False,
    fresh: Annotated[bool, option("Start anew where a run was interrupted.")] = False,
    curves: CurvesFile = None,
    moments: Annotated[Path | None, option("Moments from `trisect calibrate`.", "FILE")] = None,
    evaluate: Annotated[
        str | None, option("Text measured on. (default: held-out text, another)", "NAME|FILE|none", "--eval")
    ] = None,
    eval_windows: Annotated[int, option("Windows of each such text.")] = 8,
    dry_run: Annotated[bool, option("Show the plan and stop.")] = False,
    json: Json = None,
) -> None:
    """Narrow a model to a goal, usually --ratio, and save it as a Hugging Face folder.

    Remove a quarter of the decoder: trisect compress smollm2-135m -o small --ratio 0.25
    As small as 5% more perplexity allows, on your own text:
        trisect compress models/llama -o small --max-ppl-increase 5% --calibration text.txt
    Halve the KV cache of a large model, on a GPU:
        trisect compress meta-llama/Llama-3.1-8B -o small --kv-ratio 0.5 --device cuda
    """
    settings = at_pace(settings, fast=fast, best=best)
    if dry_run:
        plan(model, settings, loading, curves=curves, json=json)
        return
    if out is None:
        raise TrisectError("No output was named; add -o OUT (or --dry-run to see the plan only).")
    from trisect.pipeline.job import Job, carry_out
    from trisect.report.terminal import result_lines
    from trisect.support import distributed

    given: Any = {"moments": moments, "curves": curves, "evaluate": evaluate, "eval_windows": eval_windows}
    given |= {"load_options": {**asdict(loading), "stream": stream}, "fresh": fresh, "say": screen.say}
    with distributed.process_group(loading.device):
        with screen.quiet_libraries(), screen.progress(hidden=not distributed.is_rank_zero()) as report:
            result = carry_out(Job(model=model, config=settings, out=out, progress=report, **given))
        if not distributed.is_rank_zero():
            return
    screen.say(*result_lines(result))
    screen.say(f"Saved to {out}")
    screen.keep_measurement(json, result.receipt)
    name = screen.quoted(out)
    # Without --portable most models do not fit a stock architecture, and export would refuse them.
    exported = [f"trisect export {name} -o OUT"] if settings.portable else []
    screen.say_next(f"trisect eval {name}", f"trisect report {name}", *exported)


def at_pace(settings: CompressConfig, *, fast: bool, best: bool) -> CompressConfig:
    """The settings with what --fast or --best means; others must not contradict it."""
    if fast and best:
        raise TrisectError("--fast and --best were given together; keep one of them.")
    careful = {"allocate": "balanced", "refine": settings.method == "a3+"}
    means: Any = {"method": "a3"} if fast else careful if best else {}
    for name, value in means.items():
        if (given := getattr(settings, name)) not in (value, "a3+", None, False):  # the defaults may be replaced
            pace = f"--{'fast' if fast else 'best'} means {option_name(name)} {value}"
            raise TrisectError(f"{pace}, and {given} was given; keep one of them.")
    return replace(settings, **means)


@verb("Compress")
def plan(
    model: Model, settings: CompressConfig, loading: LoadOptions, curves: CurvesFile = None, json: Json = None
) -> None:
    """Show the widths that a goal comes to; weights are read only to measure loss curves.

    The widths that a quarter less comes to: trisect plan smollm2-135m --ratio 0.25
    Spread by measured losses: trisect plan smollm2-135m --ratio 0.25 --allocate balanced --curves curves.json
    What fits 100 million parameters: trisect plan smollm2-135m --target-params 100M
    """
    from trisect.pipeline.job import Job, plan_before_work
    from trisect.report.terminal import compression_table, heat_tables

    with screen.quiet_libraries(), screen.progress() as report:
        how: Any = {"load_options": asdict(loading), "say": screen.say, "progress": report}
        found = plan_before_work(Job(model=model, config=settings, curves=curves, **how))
    before, after = found.before, found.after
    screen.say(found.outlook)
    screen.say(compression_table(before, after), *([] if found.plan.masked else heat_tables(before, after)))
    screen.say(*found.lines)
    screen.keep_measurement(json, {"model": model, **found.facts})
    goal = " ".join(f"{option_name(name)} {v}" for name, v in settings.goal.settings().items() if v != "params")
    goal = f"--drop-layers {settings.drop_layers}" if settings.removes_nothing else goal
    screen.say_next(f"trisect compress {screen.quoted(model)} -o OUT {goal}, other options as here")


@verb("Compress")
def calibrate(
    model: Model,
    settings: CalibrationConfig,
    out: Annotated[Path, option("E.g. moments.safetensors.", "FILE")],
    loading: LoadOptions,
    method: Annotated[str, option("Whose moments: `trisect ls methods`.", "NAME")] = "a3",
) -> None:
    """Run the calibration tokens through a model and save its moments.

    Collect once: trisect calibrate smollm2-135m -o moments.safetensors
    ... and cut at any ratio:
        trisect compress smollm2-135m -o small --ratio 0.3 --method a3 --moments moments.safetensors
    With your own text and fewer windows:
        trisect calibrate models/llama -o moments.safetensors --calibration text.txt --samples 32
    """
    from trisect.calibrate.texts import prepare
    from trisect.methods import get_method
    from trisect.pipeline import statistics

    # Moments are the same for every ratio.
    config = CompressConfig(ratio=0.5, method=method, parts=get_method(method).parts, calibration=settings)
    statistics.refuse_stored_moments(get_method(method))
    files.check_writable(out)
    loaded = screen.load(model, loading)
    with screen.progress() as report:
        prepared = prepare(loaded.model, config, loaded.tokenizer, progress=report)
    screen.say(prepared.line(), *prepared.notes)
    with screen.progress() as report:
        info = statistics.calibrate(loaded.model, config, out, tokens=prepared.tokens, progress=report)
    screen.say(f"Moments of {info.num_tokens:,} tokens saved to {out}")
    cut = f"trisect compress {screen.quoted(model)} -o OUT --ratio 0.25"
    screen.say_next(f"{cut} --method {method} --moments {screen.quoted(out)}")


@verb("Compress")
def sample(
    model: Model,
    out: Annotated[Path, option("New file, e.g. own.jsonl.", "FILE")],
    settings: verbs.SampleConfig,
    loading: LoadOptions,
) -> None:
    """Let a model write synthetic text to calibrate on.

    Synthetic text: trisect sample smollm2-135m -o own.jsonl --device cuda
    ... alone, or beside yours:
        trisect compress smollm2-135m -o small --ratio 0.25 --calibration text.txt:0.5+own.jsonl:0.5
    Less, for a CPU: trisect sample smollm2-135m -o own.jsonl --samples 32 --length 512
    """
    from trisect.calibrate.texts import check_output, write_synthetic

    check_output(out)
    loaded = screen.load(model, loading)
    with screen.progress() as report:
        stage = partial(report, "tokens")
        written = write_synthetic(loaded.model, loaded.tokenizer, settings, out, name=model, progress=stage)
    count = settings.samples * written["recipe"]["length"]
    screen.say(f"{settings.samples} texts, {count:,} tokens, saved to {out}")
    cut = f"trisect compress {screen.quoted(model)} -o OUT --ratio 0.25"
    screen.say_next(f"{cut} --calibration {screen.quoted(out)}")
