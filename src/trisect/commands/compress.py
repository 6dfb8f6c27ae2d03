"""`trisect compress`: narrow a model and save it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trisect.commands import _options as options
from trisect.errors import TrisectError

if TYPE_CHECKING:
    from trisect.config import CompressConfig


def run(
    model: options.Model,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="New folder.")] = None,
    ratio: Annotated[
        float | None, typer.Option(help="Fraction of the decoder's weights to remove, e.g. 0.25.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="See `trisect ls methods`. (default: a3)")] = None,
    calibration: options.Calibration = None,
    samples: options.Samples = None,
    length: options.Length = None,
    sampling: options.Sampling = None,
    seed: options.Seed = None,
    batch_size: options.BatchSize = None,
    parts: Annotated[
        str | None, typer.Option(metavar="LIST", help="What to narrow. (default: qk,ov,mlp)")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="LIST", help="E.g. 4-27 or 0,3,5-7. (default: all)")
    ] = None,
    align: Annotated[
        str | None,
        typer.Option(metavar="16|8|none", help="Head widths in multiples; none = exact. (default: 16)"),
    ] = None,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    allocate: Annotated[
        str | None,
        typer.Option(metavar="uniform|balanced", help="Widths: the same share off each, or by loss curves."),
    ] = None,
    curves: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Loss curves for a balanced plan: read, or measured and written."),
    ] = None,
    moments: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Moments from `trisect calibrate`.")
    ] = None,
    evaluate: Annotated[
        str, typer.Option("--eval", metavar="NAME|FILE", help="Text for perplexity; none to skip.")
    ] = "builtin",
    eval_windows: Annotated[int, typer.Option(help="Windows of that text.")] = 8,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML or JSON; options typed here win.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    json: options.Json = None,
    quiet: options.Quiet = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Narrow a model by RATIO and save it as a Hugging Face folder."""
    recipe = build_config(
        config,
        run_options=options.given(
            ratio=ratio, method=method, parts=parts, layers=layers, align=align, allocate=allocate, seed=seed
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
    if dry_run:
        show_plan(model, recipe, curves=curves, json=json, trust_remote_code=trust_remote_code)
        return
    if out is None:
        raise TrisectError("No output was named; add -o OUT (or --dry-run to see the plan only).")
    carry_out(
        model,
        recipe,
        out=out,
        moments=moments,
        curves=curves,
        evaluate=evaluate,
        eval_windows=eval_windows,
        load_options={"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code},
        json=json,
        quiet=quiet,
    )


def build_config(
    path: Path | None, *, run_options: dict[str, Any], calibration_options: dict[str, Any]
) -> "CompressConfig":
    """The file's settings, overridden by what was typed."""
    from trisect.config import CompressConfig, read_mapping

    data = read_mapping(path) if path is not None else {}
    calibration = data.get("calibration") or {}
    if not isinstance(calibration, dict):
        raise TrisectError(f"calibration in {path} must be a mapping such as {{samples: 128}}.")
    merged = {**data, **run_options, "calibration": {**calibration, **calibration_options}}
    return CompressConfig.from_dict(merged)


def show_plan(
    model: str,
    config: "CompressConfig",
    *,
    curves: Path | None,
    json: Path | None,
    trust_remote_code: bool,
) -> None:
    """Plan from the model's configuration alone: no weights are read."""
    from trisect.commands._screen import hushed, stdout
    from trisect.files import write_json
    from trisect.models import read_shape
    from trisect.plan import apply_plan, budget_of, compare, plan_for, read_curves
    from trisect.report.table import compression_table

    with hushed():
        shape, _, _ = read_shape(model, trust_remote_code=trust_remote_code)
    plan = plan_for(shape, config, None if curves is None else read_curves(curves))
    after = apply_plan(shape, plan)
    stdout().print(compression_table(shape, after))
    if json is not None:
        old, new = budget_of(shape), budget_of(after)
        measurement = {
            "model": model,
            **compare(old, new).to_dict(),
            "before": old.to_dict(),
            "after": new.to_dict(),
            "plan": plan.to_dict(),
        }
        write_json(json, measurement)


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
