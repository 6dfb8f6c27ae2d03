"""`trisect bench`: how fast a model is at some widths, beside what its FLOPs and bytes allow."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trisect.commands import _options as options
from trisect.errors import TrisectError

if TYPE_CHECKING:
    from rich.console import Console

    from trisect.bench.measure import Effort
    from trisect.bench.rows import Rows
    from trisect.bench.run import Sweep
    from trisect.bench.subject import Subject

FAILED_ROWS = 1
ROWS, CSV, PAGE, FIGURES = "rows.json", "rows.csv", "table.md", "figures"
"""What an output folder holds."""


def run(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="As elsewhere; only its config is read. Or use --shape."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A published shape, e.g. llama-2-13b, in place of MODEL."),
    ] = None,
    ratio: Annotated[
        str | None, typer.Option(metavar="LIST", help="Fractions to remove, e.g. 0.2,0.4,0.6.")
    ] = None,
    widths: Annotated[
        str | None, typer.Option(metavar="LIST", help="Widths as QK/VO/MLP, e.g. 96/96/11008.")
    ] = None,
    align: Annotated[str, typer.Option(metavar="16|8|none", help="Grid of the widths at --ratio.")] = "16",
    folded: Annotated[
        bool, typer.Option("--folded", help="Narrow heads turn at rates of their own, as a3+ folds them.")
    ] = False,
    variants: Annotated[
        str, typer.Option(metavar="LIST", help="Of dense, owned, trisect, svd-llm.")
    ] = "dense,trisect,svd-llm",
    phase: Annotated[str, typer.Option(metavar="LIST", help="Of prefill, decode.")] = "prefill,decode",
    batch: Annotated[str, typer.Option(metavar="LIST", help="Sequences at once, e.g. 1,2,4,8.")] = "1",
    length: Annotated[str, typer.Option(metavar="LIST", help="Tokens of a prompt, e.g. 1024,2048.")] = "1024",
    new: Annotated[int, typer.Option(help="Tokens to decode behind the prompt.")] = 128,
    attention: Annotated[str, typer.Option(metavar="LIST", help="Of eager, sdpa.")] = "sdpa",
    graphs: Annotated[bool, typer.Option("--graphs", help="Decode by CUDA graphs.")] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Run through torch.compile.")] = False,
    layers: Annotated[
        int | None, typer.Option(help="Run so many layers and extrapolate to all of them.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Prefills to time.")] = 10,
    steps: Annotated[
        int | None, typer.Option(help="Decoding steps to time, from the middle. (default: all)")
    ] = None,
    latency_table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Instead: time components over the grid, for --budget latency."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of rows: those it has are not measured again.")
    ] = None,
    keep_errors: Annotated[
        bool, typer.Option("--keep-errors", help="Do not try rows again that failed before.")
    ] = False,
    no_run: Annotated[bool, typer.Option("--no-run", help="Measure nothing: show the rows of -o.")] = False,
    no_figures: Annotated[bool, typer.Option("--no-figures", help="Tables only.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights and prompts.")] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16. (default: bfloat16 on a GPU)")
    ] = None,
    device: options.Device = "cpu",
    json: options.Json = None,
    quiet: options.Quiet = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Time random models of a shape: dense, narrow and factored, with the limits beside each figure."""
    from trisect.bench.measure import Effort
    from trisect.bench.rows import Rows
    from trisect.bench.run import Sweep
    from trisect.config import parse_align

    if no_run:
        show(_rows_to_show(out), out, json=json, figures=not no_figures)
        return
    subject = _subject(model, shape, trust_remote_code)
    chosen_dtype = dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    sweep = Sweep(
        phases=_names(phase),
        batches=_numbers(batch, "--batch"),
        lengths=_numbers(length, "--length"),
        new=new,
        attentions=_names(attention),
        modes=("plain",) if not (graphs or compile) else ("graphs",) * graphs + ("compile",) * compile,
        layers=layers,
        device=device,
        dtype=chosen_dtype,
    )
    if latency_table is not None:
        time_components(subject, sweep, latency_table, align=parse_align(align), repeats=repeats, quiet=quiet)
        return
    _check_outputs(out, json)
    cut = {
        "ratios": _fractions(ratio),
        "widths": _names(widths),
        "align": parse_align(align),
        "folded": folded,
        "kinds": _names(variants),
    }
    rows = Rows.open(None if out is None else out / ROWS)
    effort = Effort(repeats=repeats, steps=steps, seed=seed)
    failed = measure(subject, sweep, rows, cut, effort, keep_errors=keep_errors, quiet=quiet)
    show(rows, out, json=json, figures=not no_figures)
    if failed:
        raise typer.Exit(code=FAILED_ROWS)


def measure(
    subject: "Subject",
    sweep: "Sweep",
    rows: "Rows",
    cut: dict[str, Any],
    effort: "Effort",
    *,
    keep_errors: bool,
    quiet: bool,
) -> int:
    """Measure what is missing, a line on stderr for each row; gives back how many failed."""
    from dataclasses import replace

    from rich.console import Console

    from trisect.bench.run import DTYPES, run_sweep
    from trisect.bench.variants import variants_of
    from trisect.commands._screen import hushed

    say = Console(stderr=True, quiet=quiet, soft_wrap=True, highlight=False)
    with hushed():
        dense = subject.dense_shape(DTYPES[sweep.dtype])
        narrowed = None if subject.narrowed is None else replace(dense, layers=subject.narrowed)
        variants = variants_of(dense, narrowed=narrowed, **cut)
        subject.sliced(sweep.layers)  # refuses a number of layers that the model does not have
        tally = run_sweep(
            subject,
            variants,
            sweep,
            rows,
            effort=effort,
            keep_errors=keep_errors,
            say=lambda text: say.print(text, markup=False),
        )
    say.print(f"{tally.measured} rows measured, {tally.done} there before, {tally.failed} failed")
    return tally.failed


def time_components(
    subject: "Subject", sweep: "Sweep", path: Path, *, align: int | None, repeats: int, quiet: bool
) -> None:
    """Write a table of measured times; one that is there is completed."""
    from trisect.bench.latency import Workload, layer_seconds, measure_latency
    from trisect.bench.run import DTYPES
    from trisect.bench.timing import laps_on
    from trisect.commands._screen import hushed, of_stage, progress, stdout
    from trisect.files import check_writable, write_json
    from trisect.plan import read_latency

    check_writable(path)
    if len(sweep.batches) > 1 or len(sweep.lengths) > 1:
        raise TrisectError("A latency table is of one batch and one length; give one of each.")
    # Both phases is what is asked for by default; a table of two workloads is none.
    phase = sweep.phases[0]
    workload = Workload(phase=phase, batch=sweep.batches[0], length=sweep.lengths[0])
    known = read_latency(path) if path.exists() else None
    with hushed(), progress(quiet=quiet) as report:
        shape = subject.dense_shape(DTYPES[sweep.dtype])
        table = measure_latency(
            shape,
            workload,
            device=sweep.device,
            dtype=DTYPES[sweep.dtype],
            lap=laps_on(sweep.device),
            align=align,
            repeats=repeats,
            known=known,
            save=lambda made: write_json(path, made.to_dict()),
            progress=of_stage(report, "timing components"),
        )
    points = sum(map(len, table.seconds.values()))
    layer = 1000 * layer_seconds(table, shape.layers[0])
    stdout().print(
        f"{path}: {points} times of {subject.name} on {table.device}, {phase} {workload.batch} x "
        f"{workload.length}; a dense layer comes to {layer:.3f} ms. Plan with: "
        f"--budget latency --latency-table {path}",
        soft_wrap=True,
        markup=False,
    )


def show(rows: "Rows", out: Path | None, *, json: Path | None, figures: bool) -> None:
    """Tables on the screen and in the folder, and the figures."""
    from trisect.bench.relate import related
    from trisect.bench.rows import write_csv
    from trisect.bench.table import notes_for, report
    from trisect.commands._screen import stdout
    from trisect.files import atomic_write_bytes, atomic_write_text, write_json

    console, notes = stdout(), notes_for(rows.rows)
    _print_tables(console, rows.rows)
    for note in notes:
        console.print(note, soft_wrap=True, markup=False)
    measured = {**rows.to_dict(), "rows": related(rows.rows), "notes": notes}
    if json is not None:
        write_json(json, measured)
    if out is None:
        return
    write_csv(out / CSV, measured["rows"])
    atomic_write_text(out / PAGE, report(rows.rows, notes=notes))
    if figures and rows.rows:
        from trisect.bench.figures import draw

        for name, picture in draw(rows.rows).items():
            atomic_write_bytes(out / FIGURES / name, picture)


def _print_tables(console: "Console", rows: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE
    from rich.table import Column, Table

    from trisect.bench.relate import failures
    from trisect.bench.rows import PHASES, Case
    from trisect.bench.table import TABLES, cells

    for phase in PHASES:
        for name, chosen in TABLES.items():
            header, lines = cells(rows, phase, chosen)
            columns = [
                Column(title, justify="left" if at < 3 else "right") for at, title in enumerate(header)
            ]
            table = Table(*columns, title=f"{phase}, {name}", box=SIMPLE, padding=(0, 1, 0, 0))
            for line in lines:
                table.add_row(*line)
            if lines:
                console.print(table)
    for row in failures(rows):
        first = row["error"].splitlines()[0]
        console.print(f"failed: {Case(**row['case']).describe()}: {first}", soft_wrap=True, markup=False)


def _subject(model: str | None, shape: str | None, trust_remote_code: bool) -> "Subject":
    from trisect.bench.subject import subject_of_model, subject_of_shape
    from trisect.commands._screen import hushed

    if (model is None) == (shape is None):
        raise TrisectError(
            "Give a MODEL or --shape NAME, one of them, e.g. `trisect bench --shape llama-2-13b`."
        )
    with hushed():
        if shape is not None:
            return subject_of_shape(shape)
        return subject_of_model(str(model), trust_remote_code=trust_remote_code)


def _rows_to_show(out: Path | None) -> "Rows":
    from trisect.bench.rows import Rows

    if out is None or not (out / ROWS).exists():
        raise TrisectError("--no-run shows rows that are there: name their folder with -o.")
    return Rows.open(out / ROWS)


def _check_outputs(out: Path | None, json: Path | None) -> None:
    from trisect.files import check_writable

    for path in (None if out is None else out / ROWS, json):
        if path is not None:
            check_writable(path)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(piece.strip() for piece in (text or "").split(",") if piece.strip()))


def _numbers(text: str, option: str) -> tuple[int, ...]:
    pieces = _names(text)
    if not pieces or not all(piece.isdigit() and int(piece) > 0 for piece in pieces):
        raise TrisectError(f"{option} takes whole numbers such as 1,2,4, not {text!r}.")
    return tuple(map(int, pieces))


def _fractions(text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(piece) for piece in _names(text))
    except ValueError:
        raise TrisectError(f"--ratio takes fractions such as 0.2,0.4,0.6, not {text!r}.") from None
