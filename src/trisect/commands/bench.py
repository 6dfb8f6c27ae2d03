"""`trisect bench`: how fast a model is, beside its dense one and what its FLOPs and bytes allow."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from trisect.commands import _screen as screen
from trisect.commands._options import Device, Json, Model, TrustRemoteCode, option, verb
from trisect.config.settings import RUNNING, parse_names
from trisect.errors import TrisectError


@verb("Measure")
def run(
    model: Model,
    phase: Annotated[str, option("Of prefill, decode.", "LIST")] = "prefill,decode",
    batch: Annotated[str, option("Sequences at once, e.g. 1,2,4,8.", "LIST")] = "1",
    length: Annotated[
        str | None, option("Tokens of a prompt, e.g. 1024,2048. (default: 1024, or what the model reads)", "LIST")
    ] = None,
    new: Annotated[
        int | None, option("Tokens to decode behind the prompt. (default: 128, or half of what the model reads)")
    ] = None,
    graphs: Annotated[bool, option("Decode by CUDA graphs.")] = False,
    compile: Annotated[bool, option("Run through torch.compile.")] = False,
    repeats: Annotated[int, option("Prefills to time.")] = 10,
    steps: Annotated[int | None, option("Decoding steps to time, from the middle. (default: all)")] = None,
    latency_table: Annotated[
        Path | None, option("Instead: time components over the grid, for --budget latency.", "FILE")
    ] = None,
    align: Annotated[str, option("Grid of the widths of --latency-table.", "32|16|8|none")] = "16",
    seed: Annotated[int, option("Seed of prompts and of the dense model's weights.")] = 0,
    dtype: Annotated[
        str | None,
        option("float32, bfloat16, float16. (default: bfloat16 on a GPU, float32 elsewhere)", "DTYPE", panel=RUNNING),
    ] = None,
    device: Device = "cpu",
    json: Json = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Time a model beside the dense one that it was made from, with the limits beside each figure.

    A compressed model beside its dense one: trisect bench small --json speed.json
    Decoding by CUDA graphs, at two batch sizes: trisect bench small --device cuda --graphs --batch 1,8
    Times for --budget latency: trisect bench small --latency-table times.json --phase decode
    """
    from trisect.bench.measure import Effort
    from trisect.bench.rows import failures, notes_for, related
    from trisect.bench.sweep import Sweep, described, fitting_lengths, time_beside_dense
    from trisect.config import parse_align

    how = {"trust_remote_code": trust_remote_code}
    lengths, new = fitting_lengths(model, () if length is None else _numbers(length, "--length"), new, **how)
    sweep = Sweep(
        phases=tuple(dict.fromkeys(parse_names(phase))),
        batches=_numbers(batch, "--batch"),
        lengths=lengths,
        new=new,
        modes=("plain",) if not (graphs or compile) else ("graphs",) * graphs + ("compile",) * compile,
        device=device,
        dtype=dtype or ("bfloat16" if device.startswith("cuda") else "float32"),
    )
    effort = Effort(repeats=repeats, steps=steps, seed=seed)
    if latency_table is not None:
        _time_components(model, sweep, latency_table, align=parse_align(align), repeats=repeats, **how)
        return
    with screen.quiet_libraries():
        found = time_beside_dense(model, sweep, effort=effort, **how, say=screen.stderr().print)
    rows, notes, failed = found["rows"], notes_for(found["rows"]), failures(found["rows"])
    _show_tables(rows)
    screen.say(*map(described, failed), *notes)
    screen.keep_measurement(json, {**found, "rows": related(rows), "notes": notes})
    screen.say_next(f"trisect report {screen.quoted(model)} --measured {screen.quoted(json)}")
    if failed:
        raise typer.Exit(code=1)


def _time_components(
    model: str, sweep: Any, path: Path, *, align: int | None, repeats: int, trust_remote_code: bool
) -> None:
    """Write a table of measured times; one that is there is completed."""
    from trisect.bench import latency, measure
    from trisect.models import checkpoint, read_shape
    from trisect.plan import read_latency
    from trisect.support.files import check_writable, write_json

    check_writable(path)
    if len(sweep.batches) > 1 or len(sweep.lengths) > 1:
        raise TrisectError("A latency table is of one batch and one length; give one of each.")
    # The default is both phases; a table has one workload, so the first.
    load = latency.Workload(phase=sweep.phases[0], batch=sweep.batches[0], length=sweep.lengths[0])
    device: Any = {"device": sweep.device, "dtype": checkpoint.DTYPES[sweep.dtype]}
    how: Any = {**device, "lap": measure.laps_on(sweep.device), "align": align, "repeats": repeats}
    known = read_latency(path) if path.exists() else None
    with screen.quiet_libraries(), screen.progress() as report:
        _, shape, _ = read_shape(model, trust_remote_code=trust_remote_code)
        how |= {
            "save": lambda made: write_json(path, made.to_dict()),
            "progress": partial(report, "timing components"),
        }
        table = latency.measure_latency(shape, load, known=known, **how)
    count, dense = sum(map(len, table.seconds.values())), 1000 * latency.layer_seconds(table, shape.layers[0])
    work = f"{load.phase} {load.batch} x {load.length}"
    screen.say(f"{path}: {count} times of {model} on {table.device}, {work}; a dense layer comes to {dense:.3f} ms.")
    screen.say_next(f"trisect plan MODEL --ratio 0.25 --budget latency --latency-table {screen.quoted(path)}")


def _show_tables(rows: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE

    from trisect.bench.rows import PHASES, TABLES, cells

    for phase, (name, chosen) in product(PHASES, TABLES.items()):
        header, lines = cells(rows, phase, chosen)
        style: Any = {"title": f"{phase}, {name}", "box": SIMPLE, "padding": (0, 1, 0, 0)}
        screen.say_table(header[:3], lines, right=header[3:], **style)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    pieces = tuple(dict.fromkeys(parse_names(text)))
    if not pieces or not all(piece.isdigit() and int(piece) > 0 for piece in pieces):
        raise TrisectError(f"{option} takes whole numbers such as 1,2,4, not {text!r}.")
    return tuple(map(int, pieces))
