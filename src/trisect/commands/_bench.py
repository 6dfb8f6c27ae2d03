"""What `trisect bench` does once it knows what to measure: the rows, the latency table, the tables."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trisect.errors import TrisectError

if TYPE_CHECKING:
    from rich.console import Console

    from trisect.bench.measure import Effort
    from trisect.bench.rows import Rows
    from trisect.bench.run import Sweep
    from trisect.bench.subject import Subject

CSV, PAGE, FIGURES = "rows.csv", "table.md", "figures"
"""What an output folder holds besides its rows."""


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

    from trisect.bench.run import DTYPES, run_sweep
    from trisect.bench.variants import variants_of
    from trisect.commands._screen import quiet_libraries, stderr

    say = stderr(quiet=quiet)
    with quiet_libraries():
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
            say=say.print,
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
    from trisect.commands._screen import of_stage, progress, quiet_libraries, quoted, say_next, stdout
    from trisect.plan import read_latency
    from trisect.support.files import check_writable, write_json

    check_writable(path)
    if len(sweep.batches) > 1 or len(sweep.lengths) > 1:
        raise TrisectError("A latency table is of one batch and one length; give one of each.")
    # Both phases is what is asked for by default; a table of two workloads is none.
    phase = sweep.phases[0]
    workload = Workload(phase=phase, batch=sweep.batches[0], length=sweep.lengths[0])
    known = read_latency(path) if path.exists() else None
    with quiet_libraries(), progress(quiet=quiet) as report:
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
        f"{workload.length}; a dense layer comes to {layer:.3f} ms.",
        soft_wrap=True,
    )
    say_next(f"trisect plan MODEL --ratio 0.25 --budget latency --latency-table {quoted(path)}", quiet=quiet)


def show(rows: "Rows", out: Path | None, *, json: Path | None, figures: bool, quiet: bool) -> None:
    """Tables on the screen and in the folder, and the figures."""
    from trisect.bench.relate import related
    from trisect.bench.rows import write_csv
    from trisect.bench.table import notes_for, report
    from trisect.commands._screen import keep_measurement, say_next, say_saved, stdout
    from trisect.support.files import atomic_write_bytes, atomic_write_text

    console, notes = stdout(), notes_for(rows.rows)
    _print_tables(console, rows.rows)
    for note in notes:
        console.print(note, soft_wrap=True, markup=False)
    measured = {**rows.to_dict(), "rows": related(rows.rows), "notes": notes}
    keep_measurement(json, measured)
    if out is None:
        say_next("-o DIR keeps the rows, and measures only what it lacks", quiet=quiet or json is not None)
        return
    write_csv(out / CSV, measured["rows"])
    atomic_write_text(out / PAGE, report(rows.rows, notes=notes))
    if figures and rows.rows:
        from trisect.bench.figures import draw

        for name, picture in draw(rows.rows).items():
            atomic_write_bytes(out / FIGURES / name, picture)
    say_saved(out)


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
