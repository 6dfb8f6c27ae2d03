"""`trisect bench`: how fast a model is at some widths, beside what its FLOPs and bytes allow."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trisect.commands import _options as options
from trisect.commands._bench import measure, show, time_components
from trisect.commands._names import completed, model_names, one_of
from trisect.errors import TrisectError

if TYPE_CHECKING:
    from trisect.bench.rows import Rows
    from trisect.bench.subject import Subject

PANEL = "Measure"
EXAMPLES = (
    ("A published shape, dense and narrow", "trisect bench --shape llama-2-13b --ratio 0.2,0.4 --layers 4"),
    ("The widths of a compressed model, kept in a folder", "trisect bench small -o speed --device cuda"),
    ("Times for --budget latency", "trisect bench small --latency-table times.json --phase decode"),
)
FAILED_ROWS = 1
ROWS = "rows.json"
"""In an output folder: what was measured."""


def run(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="As elsewhere; only its config is read. Or use --shape.",
            autocompletion=completed(model_names),
        ),
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
    align: Annotated[str, typer.Option(metavar="32|16|8|none", help="Grid of the widths at --ratio.")] = "16",
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
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Folder of rows: those it has are not measured again."
        ),
    ] = None,
    keep_errors: Annotated[
        bool, typer.Option("--keep-errors", help="Do not try rows again that failed before.")
    ] = False,
    no_run: Annotated[bool, typer.Option("--no-run", help="Measure nothing: show the rows of -o.")] = False,
    no_figures: Annotated[bool, typer.Option("--no-figures", help="Tables only.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights and prompts.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="float32, bfloat16 or float16. (default: bfloat16 on a GPU, float32 elsewhere)",
            autocompletion=one_of("float32", "bfloat16", "float16"),
            rich_help_panel=options.RUNNING,
        ),
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
    from trisect.support.files import check_writable

    if no_run:
        show(_rows_to_show(out), out, json=json, figures=not no_figures, quiet=quiet)
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
    if out is not None:
        check_writable(out / ROWS)
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
    show(rows, out, json=json, figures=not no_figures, quiet=quiet)
    if failed:
        raise typer.Exit(code=FAILED_ROWS)


def _subject(model: str | None, shape: str | None, trust_remote_code: bool) -> "Subject":
    from trisect.bench.subject import subject_of_model, subject_of_shape
    from trisect.commands._screen import quiet_libraries

    if (model is None) == (shape is None):
        raise TrisectError(
            "Give a MODEL or --shape NAME, one of them, e.g. `trisect bench --shape llama-2-13b`."
        )
    with quiet_libraries():
        if shape is not None:
            return subject_of_shape(shape)
        return subject_of_model(str(model), trust_remote_code=trust_remote_code)


def _rows_to_show(out: Path | None) -> "Rows":
    from trisect.bench.rows import Rows

    if out is None or not (out / ROWS).exists():
        raise TrisectError("--no-run shows rows that are there: name their folder with -o.")
    return Rows.open(out / ROWS)


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
