"""`trisect eval`: the perplexity of a model on a text, and its scores on tasks."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trisect.commands import _options as options
from trisect.commands._names import completed, data_names, one_of
from trisect.errors import TrisectError

if TYPE_CHECKING:
    from rich.table import Table

    from trisect.evaluate.perplexity import PositionProfile
    from trisect.evaluate.tasks import LoadedTask, TaskResults
    from trisect.models import Loaded

PANEL = "Measure"
EXAMPLES = (
    ("Perplexity on the text that is always there", "trisect eval small"),
    ("On your own text, kept as a file", "trisect eval small --data text.txt --length 1024 --json eval.json"),
    ("The paper's tasks, 100 questions of each", "trisect eval small --tasks paper --limit 100"),
)


def run(
    model: options.Model,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Text: `trisect ls data`, or a file. (default: builtin, or none with --tasks)",
            autocompletion=completed(data_names),
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens per window. (default: 2048, or the model's context)")
    ] = None,
    windows: Annotated[int | None, typer.Option(help="Number of windows. (default: all)")] = None,
    sampling: Annotated[
        str,
        typer.Option(
            metavar="random|first", help="Which windows are taken.", autocompletion=one_of("random", "first")
        ),
    ] = "first",
    seed: Annotated[int, typer.Option(help="Seed of random windows.")] = 0,
    by_position: Annotated[
        int | None,
        typer.Option(
            metavar="BUCKETS",
            help="Also the perplexity at so many stretches of the window, from its start to its end.",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="PRESET|TASK[:SHOTS],...",
            help="Tasks of lm-eval, from the hub: paper, zero-shot, quick, or its names: boolq,winogrande:5.",
            autocompletion=one_of("paper", "zero-shot", "quick"),
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Questions per task, for a quick look. (default: all)")] = None,
    shots: Annotated[
        int | None, typer.Option(help="Examples in each prompt. (default: as the preset or lm-eval has it)")
    ] = None,
    batch_size: options.BatchSize = None,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    json: options.Json = None,
    quiet: options.Quiet = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Measure the perplexity of a model on a text, its scores on tasks, or both."""
    from trisect.calibrate.texts import USUAL_LENGTH, usual_length
    from trisect.commands._screen import keep_measurement, load, quoted, say_next
    from trisect.evaluate.perplexity import check_buckets
    from trisect.evaluate.tasks import check_request, load_task, parse_tasks

    requests = [] if tasks is None else parse_tasks(tasks, shots=shots)
    if by_position is not None:
        if data is None and requests:
            raise TrisectError("--by-position is about a text, and tasks are not one: add --data builtin.")
        check_buckets(by_position, length=length or USUAL_LENGTH)
    if requests:
        check_request(limit=limit, batch_size=batch_size)
    elif limit is not None or shots is not None:
        raise TrisectError("--limit and --shots are about tasks: add --tasks paper, or another.")
    prepared = [load_task(request) for request in requests]  # before the model: the hub may be out of reach
    loaded = load(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    measured: dict[str, Any] = {"model": model}
    if data is not None or not requests:
        length = length or usual_length(loaded.model)
        choice = {"samples": windows, "length": length, "sampling": sampling, "seed": seed}
        settings: dict[str, Any] = {"buckets": by_position, "batch_size": batch_size, "quiet": quiet}
        measured |= _perplexity(loaded, data or "builtin", choice, **settings)
    if requests:
        measured["tasks"] = _tasks(loaded, prepared, limit=limit, batch_size=batch_size, quiet=quiet)
    keep_measurement(json, measured)
    kept = "FILE, after --json FILE here" if json is None else quoted(json)
    say_next(f"trisect report RUN --measured {kept}", quiet=quiet)


def _perplexity(
    loaded: "Loaded", data: str, choice: dict[str, Any], *, buckets: int | None, batch_size: int | None, quiet: bool
) -> dict[str, Any]:
    from trisect.commands._screen import of_stage, progress, stdout
    from trisect.data import load_tokens
    from trisect.evaluate.perplexity import perplexity, perplexity_by_position

    tokens, profile = load_tokens(data, loaded.tokenizer, split="evaluation", **choice), None
    with progress(quiet=quiet) as report:
        settings: dict[str, Any] = {"batch_size": batch_size, "progress": of_stage(report, "perplexity")}
        if buckets is None:
            result = perplexity(loaded.model, tokens, **settings)
        else:
            result, profile = perplexity_by_position(loaded.model, tokens, buckets=buckets, **settings)
    stdout().print(
        f"perplexity {result.perplexity:.4f} on {result.data} ({result.windows} windows of {result.length} tokens)",
        soft_wrap=True,
    )
    if profile is None:
        return asdict(result)
    stdout().print(_profile_table(profile))
    return {**asdict(result), "by_position": asdict(profile)}


def _profile_table(profile: "PositionProfile") -> "Table":
    """One row per bucket of positions."""
    from rich.table import Column, Table

    table = Table(*(Column(name, justify="right") for name in ("positions", "tokens", "nll", "perplexity")))
    for index, value in enumerate(profile.perplexity):
        positions = f"{profile.edges[index]} to {profile.edges[index + 1] - 1}"
        table.add_row(positions, str(profile.tokens[index]), f"{profile.nll[index]:.4f}", f"{value:.4f}")
    return table


def _tasks(
    loaded: "Loaded", tasks: "list[LoadedTask]", *, limit: int | None, batch_size: int | None, quiet: bool
) -> dict[str, Any]:
    from trisect.commands._screen import progress, quiet_libraries, stdout
    from trisect.evaluate.tasks import evaluate_tasks

    with quiet_libraries(), progress(quiet=quiet) as report:
        results = evaluate_tasks(
            loaded.model, loaded.tokenizer, tasks, limit=limit, batch_size=batch_size, progress=report
        )
    stdout().print(_table(results))
    return results.to_dict()


def _table(results: "TaskResults") -> "Table":
    """One row per task, then the average."""
    from rich.table import Column, Table

    limited = "" if results.limit is None else f" (--limit {results.limit})"
    numbers = [Column(name, justify="right") for name in ("shots", f"questions{limited}", "score", "error")]
    table = Table("task", "metric", *numbers)
    for score in results.scores:
        error = "" if score.stderr is None else f"+-{score.stderr:.4f}"
        asked = f"{score.questions} of {score.available}"
        table.add_row(score.task, _metric(score.metric), str(score.shots), asked, f"{score.value:.4f}", error)
    table.add_section()
    error = "" if results.average_stderr is None else f"+-{results.average_stderr:.4f}"
    table.add_row("average", "", "", "", f"{results.average:.4f}", error)
    return table


def _metric(key: str) -> str:
    """lm-eval's `metric,filter` for people: the filter `none` says nothing."""
    return key.removesuffix(",none").replace(",", ", ")
