"""`trisect compress`: narrow a model and save it."""

from pathlib import Path
from typing import Annotated

import typer

from trisect.commands import _options as options
from trisect.commands import _recipe as recipe
from trisect.commands._job import Job, carry_out
from trisect.commands._names import completed, data_names
from trisect.commands.plan import show_plan
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
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="New folder.")] = None,
    ratio: recipe.Ratio = None,
    kv_ratio: recipe.KvRatio = None,
    target_params: recipe.TargetParams = None,
    target_kv_bytes: recipe.TargetKvBytes = None,
    max_ppl_increase: recipe.MaxPplIncrease = None,
    budget: recipe.Budget = None,
    latency_table: recipe.LatencyTable = None,
    floor: recipe.Floor = None,
    method: recipe.Method = None,
    calibration: options.Calibration = None,
    samples: options.Samples = None,
    length: options.Length = None,
    sampling: options.Sampling = None,
    seed: options.Seed = None,
    batch_size: options.BatchSize = None,
    parts: recipe.Parts = None,
    layers: recipe.Layers = None,
    align: recipe.Align = None,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    stream: options.Stream = "auto",
    states: options.States = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew where a run was interrupted.")] = False,
    allocate: recipe.Allocate = None,
    curves: recipe.Curves = None,
    rope_scope: recipe.RopeScope = None,
    without: recipe.Without = None,
    portable: recipe.Portable = None,
    qk_norm_tolerance: recipe.QkNormTolerance = None,
    moments: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Moments from `trisect calibrate`.")
    ] = None,
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
    chosen = recipe.build_config(locals())  # every option above, by its name
    load_options = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    if dry_run:
        show_plan(model, chosen, curves=curves, json=json, quiet=quiet, load_options=load_options)
        return
    if out is None:
        raise TrisectError("No output was named; add -o OUT (or --dry-run to see the plan only).")
    carry_out(
        Job(
            model=model,
            config=chosen,
            out=out,
            moments=moments,
            curves=curves,
            evaluate=evaluate,
            eval_windows=eval_windows,
            load_options={**load_options, "stream": stream},
            fresh=fresh,
            quiet=quiet,
        ),
        json=json,
    )
