"""`trisect compress`: narrow a model and save it."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trisect.commands import _screen as screen
from trisect.commands._options import NEW_FOLDER, CurvesFile, Json, LoadOptions, Model, option, verb
from trisect.commands.plan import plan
from trisect.config import CompressConfig
from trisect.config.settings import CUT, RUNNING
from trisect.errors import TrisectError

if TYPE_CHECKING:
    from trisect.pipeline.job import Result

WORTH_MORE = 0.05  # share of the perplexity that more text could take away, below which nothing is said
UNREMARKABLE = ("full width", "folded")  # notes that are kept in the receipt, but not printed layer by layer


@verb("Compress")
def run(
    model: Model,
    settings: CompressConfig,
    loading: LoadOptions,
    out: Annotated[Path | None, option(NEW_FOLDER, "DIR")] = None,
    stream: Annotated[
        str, option("Read layers one at a time; auto: where memory is short.", "auto|on|off", panel=RUNNING)
    ] = "auto",
    fast: Annotated[bool, option("The paper's method, a3: faster, less accurate.", panel=CUT)] = False,
    best: Annotated[
        bool, option("Widths by loss curves (--allocate balanced): slower, more accurate.", panel=CUT)
    ] = False,
    fresh: Annotated[bool, option("Start anew where a run was interrupted.")] = False,
    curves: CurvesFile = None,
    moments: Annotated[Path | None, option("Moments from `trisect calibrate`.", "FILE")] = None,
    evaluate: Annotated[
        str | None,
        option(
            "Text for perplexity before and after; none to skip. (default: held out of each calibration "
            "text, and another text)",
            "NAME|FILE|none",
            "--eval",
        ),
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
    from trisect.support import distributed

    given: Any = {"moments": moments, "curves": curves, "evaluate": evaluate, "eval_windows": eval_windows}
    given |= {"load_options": {**asdict(loading), "stream": stream}, "fresh": fresh, "say": screen.say}
    with distributed.process_group(loading.device):
        with screen.quiet_libraries(), screen.progress(hidden=not distributed.is_rank_zero()) as report:
            result = carry_out(Job(model=model, config=settings, out=out, progress=report, **given))
        if not distributed.is_rank_zero():
            return
    show_result(result)
    screen.say(f"Saved to {out}")
    screen.keep_measurement(json, result.receipt)
    name = screen.quoted(out)
    # Without --portable most models do not fit a stock architecture, and export would refuse them.
    exported = [f"trisect export {name} -o OUT"] if settings.portable else []
    screen.say_next(f"trisect eval {name}", f"trisect report {name}", *exported)


def at_pace(settings: CompressConfig, *, fast: bool, best: bool) -> CompressConfig:
    """The settings with what --fast or --best means; others must not contradict it."""
    clash = ""
    if fast and best:
        clash = "--fast and --best were given together"
    elif fast and settings.method not in ("a3", "a3+"):
        clash = f"--fast means --method a3, and {settings.method} was given"
    elif best and settings.allocate not in (None, "balanced"):
        clash = f"--best means --allocate balanced, and {settings.allocate} was given"
    if clash:
        raise TrisectError(f"{clash}; keep one of them.")
    change: Any = {"method": "a3"} if fast else {"allocate": "balanced"} if best else {}
    return replace(settings, **change)


def more_samples(receipt: dict[str, Any]) -> str | None:
    """A line about what more calibration text could gain: by how much held-out text rose more than fitted text."""
    rises = [_rise(row) for row in receipt.get("perplexities", ()) if row["after"]["data"].startswith("held-out ")]
    if "fitted" not in receipt or not rises:
        return None
    held, fitted = sum(rises) / len(rises), _rise(receipt["fitted"])
    gain = 1 - math.exp(min(0.0, fitted - held))
    if gain < WORTH_MORE:
        return None
    samples = receipt["recipe"]["calibration"]["samples"]
    found = f"perplexity rose x{math.exp(held):.2f} on held-out text, x{math.exp(fitted):.2f} on windows calibrated on"
    more = f"More could lower it by up to {gain:.0%}: try --samples {4 * samples} (now {samples})"
    return f"Few samples: {found}. {more}."


def _rise(row: dict[str, Any]) -> float:
    return float(row["after"]["nll"] - row["before"]["nll"])


def show_result(result: "Result") -> None:
    """Print the final table, the trials under a bound, and the solver's notes."""
    from trisect.bundle import weights_size
    from trisect.models import zeros_of
    from trisect.plan import budget_of
    from trisect.report.terminal import compression_table

    known, out = result.receipt.get("source_bytes"), result.receipt.get("out")
    files = None if known is None or out is None else (known, weights_size(Path(out)))
    rows = [*result.perplexities, *([] if result.fitted is None else [result.fitted])]
    screen.say(compression_table(result.before, result.after, files=files, perplexities=rows))
    if more := more_samples(result.receipt):
        screen.say(more)
    if result.plan.masked:
        zeros = zeros_of(result.model) / budget_of(result.before).linear_parameters
        screen.say(f"{zeros:.1%} of the decoder's linear weights are zero now; no shape has changed.")
    if target := result.receipt.get("target"):
        windows, bound = target["held_out"]["windows"], target["max_ppl_increase"]
        screen.say(f"Perplexity on {windows} held-out calibration windows may rise by {bound}:")
        for trial in target["trials"]:
            verdict = "inside" if trial["inside"] else "outside"
            screen.say(f"  {trial['ratio']:.1%} removed: x{math.exp(trial['rise']):.4f}, {verdict}")
    for entry in result.losses:
        if entry["note"] and not entry["note"].startswith(UNREMARKABLE):
            screen.say(f"layer {entry['layer']} {entry['component']}: {entry['note']}")
