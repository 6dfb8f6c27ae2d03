"""`trisect compress`: narrow a model and save it."""

from pathlib import Path
from typing import Annotated

import typer

from trisect.commands import _options as options
from trisect.commands._names import completed, data_names
from trisect.commands.plan import show_plan
from trisect.config import CompressConfig
from trisect.errors import TrisectError

PANEL = "Compress"
EXAMPLES = (
    ("Remove a quarter of the decoder", "trisect compress smollm2-135m -o small --ratio 0.25"),
    (
        "As small as 5% more perplexity allows, on your own text",
        "trisect compress models/llama -o small --max-ppl-increase 5% --calibration text.txt",
    ),
    (
        "Halve the KV cache of a large model, on a GPU",
        "trisect compress meta-llama/Llama-3.1-8B -o small --kv-ratio 0.5 --device cuda",
    ),
)


def run(
    model: options.Model,
    settings: CompressConfig,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="New folder.")] = None,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    stream: options.Stream = "auto",
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew where a run was interrupted.")] = False,
    curves: options.Curves = None,
    moments: Annotated[Path | None, typer.Option(metavar="FILE", help="Moments from `trisect calibrate`.")] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(
            "--eval",
            metavar="NAME|FILE|none",
            help="Text for perplexity before and after; none to skip. (default: held-out windows of each "
            "calibration text, and a text that took no part)",
            autocompletion=completed(data_names),
        ),
    ] = None,
    eval_windows: Annotated[int, typer.Option(help="Windows of each such text.")] = 8,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    json: options.Json = None,
    quiet: options.Quiet = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Narrow a model to a goal, usually --ratio, and save it as a Hugging Face folder."""
    load_options = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    if dry_run:
        show_plan(model, settings, curves=curves, json=json, quiet=quiet, load_options=load_options)
        return
    if out is None:
        raise TrisectError("No output was named; add -o OUT (or --dry-run to see the plan only).")
    from trisect.commands._result import show_result
    from trisect.commands._screen import keep_measurement, progress, quiet_libraries, quoted, say, say_next, say_saved
    from trisect.pipeline.job import Job, carry_out
    from trisect.support import distributed

    job = Job(
        model=model,
        config=settings,
        out=out,
        moments=moments,
        curves=curves,
        evaluate=evaluate,
        eval_windows=eval_windows,
        load_options={**load_options, "stream": stream},
        fresh=fresh,
    )
    with distributed.process_group(device):
        with quiet_libraries(), progress(quiet=quiet or not distributed.is_rank_zero()) as report:
            result = carry_out(job, say=say, progress=report)
        if not distributed.is_rank_zero():
            return
    show_result(result)
    say_saved(out)
    keep_measurement(json, result.receipt)
    name = quoted(out)
    # Without --portable most models do not fit a stock architecture, and export would refuse them.
    exported = [f"trisect export {name} -o OUT"] if settings.portable else []
    say_next(f"trisect eval {name}", f"trisect report {name}", *exported, quiet=quiet)
