"""`trisect compress`: narrow a model and save it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trisect.commands import _options as options
from trisect.commands import _recipe as recipe
from trisect.commands.plan import show_plan
from trisect.errors import TrisectError

if TYPE_CHECKING:
    from trisect.config import CompressConfig


def run(
    model: options.Model,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="New folder.")] = None,
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
    allocate: recipe.Allocate = None,
    curves: recipe.Curves = None,
    rope_scope: recipe.RopeScope = None,
    without: recipe.Without = None,
    moments: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Moments from `trisect calibrate`.")
    ] = None,
    evaluate: Annotated[
        str, typer.Option("--eval", metavar="NAME|FILE", help="Text for perplexity; none to skip.")
    ] = "builtin",
    eval_windows: Annotated[int, typer.Option(help="Windows of that text.")] = 8,
    config: recipe.Config = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    json: options.Json = None,
    quiet: options.Quiet = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Narrow a model to a goal, usually --ratio, and save it as a Hugging Face folder."""
    chosen = recipe.build_config(
        config,
        run_options=options.given(
            ratio=ratio,
            kv_ratio=kv_ratio,
            target_params=target_params,
            target_kv_bytes=target_kv_bytes,
            max_ppl_increase=max_ppl_increase,
            budget=budget,
            latency_table=latency_table,
            floor=floor,
            method=method,
            parts=parts,
            layers=layers,
            align=align,
            allocate=allocate,
            rope_scope=rope_scope,
            without=without,
            seed=seed,
        ),
        calibration_options=options.given(
            source=calibration,
            samples=samples,
            length=length,
            sampling=sampling,
            seed=seed,
            batch_size=batch_size,
        ),
    )
    load_options = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    if dry_run:
        show_plan(model, chosen, curves=curves, json=json, quiet=quiet, load_options=load_options)
        return
    if out is None:
        raise TrisectError("No output was named; add -o OUT (or --dry-run to see the plan only).")
    carry_out(
        model,
        chosen,
        out=out,
        moments=moments,
        curves=curves,
        evaluate=evaluate,
        eval_windows=eval_windows,
        load_options=load_options,
        json=json,
        quiet=quiet,
    )


def carry_out(
    model: str,
    config: "CompressConfig",
    *,
    out: Path,
    moments: Path | None,
    curves: Path | None,
    evaluate: str,
    eval_windows: int,
    load_options: dict[str, Any],
    json: Path | None,
    quiet: bool,
) -> None:
    """Load, measure, compress, save, measure; everything that can be refused is refused first."""
    from trisect.commands._flow import compress_and_measure, load
    from trisect.commands._screen import progress, stdout
    from trisect.data import load_tokens
    from trisect.files import check_new_folder, check_writable, write_json
    from trisect.methods import get_method
    from trisect.models import save_model

    check_new_folder(out)
    get_method(config.method)
    if config.max_ppl_increase is not None and moments is not None:
        raise TrisectError(
            "--max-ppl-increase is measured on calibration windows, which moments do not hold; "
            "leave --moments out."
        )
    if json is not None:
        check_writable(json)
    loaded = load(model, **load_options)
    evaluation = None
    if evaluate != "none":
        evaluation = load_tokens(
            evaluate,
            loaded.tokenizer,
            samples=eval_windows,
            length=config.calibration.length,
            sampling="first",
            seed=config.seed,
            split="evaluation",
        )
    with progress(quiet=quiet) as report:
        outcome = compress_and_measure(
            loaded, config, evaluation=evaluation, moments=moments, curves=curves, report=report
        )
    save_model(outcome.compressed.model, loaded.tokenizer, out, receipt=outcome.compressed.receipt)
    outcome.show()
    stdout().print(f"Saved to {out}", soft_wrap=True)
    if json is not None:
        write_json(json, {"model": model, "out": str(out), **outcome.to_dict()})
