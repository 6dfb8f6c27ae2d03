"""`trisect bench`: how fast a model is at some widths, beside what its FLOPs and bytes allow."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trisect.commands import _screen as screen
from trisect.commands._options import Device, Json, TrustRemoteCode, argument, option
from trisect.config.settings import RUNNING
from trisect.errors import TrisectError

if TYPE_CHECKING:
    from trisect.bench.random_models import Subject
    from trisect.bench.rows import Rows
    from trisect.bench.sweep import Sweep

PANEL = "Measure"
EXAMPLES = (
    ("A published shape, dense and narrow", "trisect bench --shape llama-2-13b --ratio 0.2,0.4 --layers 4"),
    ("The widths of a compressed model, kept in a folder", "trisect bench small -o speed --device cuda"),
    ("Times for --budget latency", "trisect bench small --latency-table times.json --phase decode"),
)
FAILED_ROWS = 1
ROWS, CSV, PAGE, FIGURES = "rows.json", "rows.csv", "table.md", "figures"
"""What an output folder holds."""


def run(
    model: Annotated[str | None, argument("As elsewhere; only its config is read. Or use --shape.", "[MODEL]")] = None,
    shape: Annotated[str | None, option("A published shape, e.g. llama-2-13b, in place of MODEL.", "NAME")] = None,
    ratio: Annotated[str | None, option("Fractions to remove, e.g. 0.2,0.4,0.6.", "LIST")] = None,
    widths: Annotated[str | None, option("Widths as QK/VO/MLP, e.g. 96/96/11008.", "LIST")] = None,
    align: Annotated[str, option("Grid of the widths at --ratio.", "32|16|8|none")] = "16",
    folded: Annotated[bool, option("Narrow heads turn at rates of their own, as a3+ folds them.")] = False,
    variants: Annotated[str, option("Of dense, owned, trisect, svd-llm.", "LIST")] = "dense,trisect,svd-llm",
    phase: Annotated[str, option("Of prefill, decode.", "LIST")] = "prefill,decode",
    batch: Annotated[str, option("Sequences at once, e.g. 1,2,4,8.", "LIST")] = "1",
    length: Annotated[str, option("Tokens of a prompt, e.g. 1024,2048.", "LIST")] = "1024",
    new: Annotated[int, option("Tokens to decode behind the prompt.")] = 128,
    attention: Annotated[str, option("Of eager, sdpa.", "LIST")] = "sdpa",
    graphs: Annotated[bool, option("Decode by CUDA graphs.")] = False,
    compile: Annotated[bool, option("Run through torch.compile.")] = False,
    layers: Annotated[int | None, option("Run so many layers and extrapolate to all of them.")] = None,
    repeats: Annotated[int, option("Prefills to time.")] = 10,
    steps: Annotated[int | None, option("Decoding steps to time, from the middle. (default: all)")] = None,
    latency_table: Annotated[
        Path | None, option("Instead: time components over the grid, for --budget latency.", "FILE")
    ] = None,
    out: Annotated[Path | None, option("Folder of rows: those it has are not measured again.", "DIR")] = None,
    keep_errors: Annotated[bool, option("Do not try rows again that failed before.")] = False,
    no_run: Annotated[bool, option("Measure nothing: show the rows of -o.")] = False,
    no_figures: Annotated[bool, option("Tables only.")] = False,
    seed: Annotated[int, option("Seed of weights and prompts.")] = 0,
    dtype: Annotated[
        str | None,
        option("float32, bfloat16, float16. (default: bfloat16 on a GPU, float32 elsewhere)", "DTYPE", panel=RUNNING),
    ] = None,
    device: Device = "cpu",
    json: Json = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Time random models of a shape: dense, narrow and factored, with the limits beside each figure."""
    from trisect.bench.measure import Effort
    from trisect.bench.random_models import variants_of
    from trisect.bench.rows import Rows
    from trisect.bench.sweep import DTYPES, Sweep, run_sweep
    from trisect.config import parse_align
    from trisect.support.files import check_writable

    if no_run:
        if out is None or not (out / ROWS).exists():
            raise TrisectError("--no-run shows rows that are there: name their folder with -o.")
        _show(Rows.open(out / ROWS), out, json=json, figures=not no_figures)
        return
    subject = _subject(model, shape, trust_remote_code)
    sweep = Sweep(
        phases=_names(phase),
        batches=_numbers(batch, "--batch"),
        lengths=_numbers(length, "--length"),
        new=new,
        attentions=_names(attention),
        modes=("plain",) if not (graphs or compile) else ("graphs",) * graphs + ("compile",) * compile,
        layers=layers,
        device=device,
        dtype=dtype or ("bfloat16" if device.startswith("cuda") else "float32"),
    )
    if latency_table is not None:
        _time_components(subject, sweep, latency_table, align=parse_align(align), repeats=repeats)
        return
    if out is not None:
        check_writable(out / ROWS)
    rows = Rows.open(None if out is None else out / ROWS)
    effort, say = Effort(repeats=repeats, steps=steps, seed=seed), screen.stderr()
    with screen.quiet_libraries():
        models = variants_of(
            subject.dense_shape(DTYPES[sweep.dtype]),
            kinds=_names(variants),
            ratios=_fractions(ratio),
            widths=_names(widths),
            narrowed=subject.narrowed,
            align=parse_align(align),
            folded=folded,
        )
        subject.sliced(layers)  # refuses a number of layers that the model does not have
        tally = run_sweep(subject, models, sweep, rows, effort=effort, keep_errors=keep_errors, say=say.print)
    say.print(f"{tally.measured} rows measured, {tally.done} there before, {tally.failed} failed")
    _show(rows, out, json=json, figures=not no_figures)
    if tally.failed:
        raise typer.Exit(code=FAILED_ROWS)


def _subject(model: str | None, shape: str | None, trust_remote_code: bool) -> "Subject":
    from trisect.bench.random_models import subject_of_model, subject_of_shape

    if (model is None) == (shape is None):
        raise TrisectError("Give a MODEL or --shape NAME, one of them, e.g. `trisect bench --shape llama-2-13b`.")
    with screen.quiet_libraries():
        if shape is not None:
            return subject_of_shape(shape)
        return subject_of_model(str(model), trust_remote_code=trust_remote_code)


def _time_components(subject: "Subject", sweep: "Sweep", path: Path, *, align: int | None, repeats: int) -> None:
    """Write a table of measured times; one that is there is completed."""
    from trisect.bench.latency import Workload, layer_seconds, measure_latency
    from trisect.bench.measure import laps_on
    from trisect.bench.sweep import DTYPES
    from trisect.plan import read_latency
    from trisect.support.files import check_writable, write_json

    check_writable(path)
    if len(sweep.batches) > 1 or len(sweep.lengths) > 1:
        raise TrisectError("A latency table is of one batch and one length; give one of each.")
    # The default is both phases; a table has one workload, so the first.
    load = Workload(phase=sweep.phases[0], batch=sweep.batches[0], length=sweep.lengths[0])
    dtype = DTYPES[sweep.dtype]
    with screen.quiet_libraries(), screen.progress() as report:
        shape = subject.dense_shape(dtype)
        table = measure_latency(
            shape,
            load,
            device=sweep.device,
            dtype=dtype,
            lap=laps_on(sweep.device),
            align=align,
            repeats=repeats,
            known=read_latency(path) if path.exists() else None,
            save=lambda made: write_json(path, made.to_dict()),
            progress=partial(report, "timing components"),
        )
    screen.say(
        f"{path}: {sum(map(len, table.seconds.values()))} times of {subject.name} on {table.device}, "
        f"{load.phase} {load.batch} x {load.length}; a dense layer comes to "
        f"{1000 * layer_seconds(table, shape.layers[0]):.3f} ms."
    )
    screen.say_next(f"trisect plan MODEL --ratio 0.25 --budget latency --latency-table {screen.quoted(path)}")


def _show(rows: "Rows", out: Path | None, *, json: Path | None, figures: bool) -> None:
    """Tables on the screen and in the folder, and the figures."""
    from trisect.bench.rows import Case, failures, notes_for, page, related, to_csv
    from trisect.support.files import atomic_write_bytes, atomic_write_text

    notes = notes_for(rows.rows)
    _show_tables(rows.rows)
    failed = [f"failed: {Case(**r['case']).describe()}: {r['error'].splitlines()[0]}" for r in failures(rows.rows)]
    screen.say(*failed, *notes)
    measured = {**rows.to_dict(), "rows": related(rows.rows), "notes": notes}
    screen.keep_measurement(json, measured)
    if out is None:
        screen.say_next(*(["-o DIR keeps the rows, and measures only what it lacks"] if json is None else []))
        return
    atomic_write_text(out / CSV, to_csv(measured["rows"]))
    atomic_write_text(out / PAGE, page(rows.rows, notes=notes))
    if figures and rows.rows:
        from trisect.bench.rows import draw

        for name, picture in draw(rows.rows).items():
            atomic_write_bytes(out / FIGURES / name, picture)
    screen.say_saved(out)


def _show_tables(rows: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE

    from trisect.bench.rows import PHASES, TABLES, cells

    for phase in PHASES:
        for name, chosen in TABLES.items():
            header, lines = cells(rows, phase, chosen)
            style: dict[str, Any] = {"title": f"{phase}, {name}", "box": SIMPLE, "padding": (0, 1, 0, 0)}
            table = screen.table(*header[:3], right=header[3:], **style)
            for line in lines:
                table.add_row(*line)
            if lines:
                screen.say(table)


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
