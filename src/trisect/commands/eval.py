"""`trisect eval`: the perplexity of a model on a text, and its scores on tasks."""

from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from trisect.commands import _screen as screen
from trisect.commands._options import Json, Length, LoadOptions, Model, option, verb
from trisect.config.settings import RUNNING
from trisect.errors import TrisectError, check_names


@verb("Measure")
def run(
    model: Model,
    loading: LoadOptions,
    data: Annotated[
        str | None, option("Text: `trisect ls data`, or a file. (default: builtin, or none with --tasks)", "NAME|FILE")
    ] = None,
    length: Length = None,
    windows: Annotated[int | None, option("Number of windows. (default: all)")] = None,
    sampling: Annotated[str, option("Which windows are taken.", "random|first")] = "first",
    seed: Annotated[int, option("Seed of random windows.")] = 0,
    tasks: Annotated[
        str | None,
        option(
            "Tasks of lm-eval, from the hub: paper, zero-shot, quick, or its names: boolq,winogrande:5.",
            "PRESET|TASK[:SHOTS],...",
        ),
    ] = None,
    limit: Annotated[int | None, option("Questions per task, for a quick look. (default: all)")] = None,
    shots: Annotated[int | None, option("Examples in each prompt. (default: as the preset or lm-eval has it)")] = None,
    batch_size: Annotated[
        int | None, option("Windows per forward pass; chosen for you by default.", panel=RUNNING)
    ] = None,
    backend: Annotated[str, option("What runs the model.", "transformers|vllm", panel=RUNNING)] = "transformers",
    json: Json = None,
) -> None:
    """Measure the perplexity of a model on a text, its scores on tasks, or both.

    Perplexity on the text that is always there: trisect eval small
    On your own text, kept as a file: trisect eval small --data text.txt --length 1024 --json eval.json
    The paper's tasks, 100 questions of each: trisect eval small --tasks paper --limit 100
    """
    from trisect.calibrate.texts import usual_length
    from trisect.data import evaluation_tokens
    from trisect.evaluate.perplexity import perplexity
    from trisect.evaluate.tasks import check_request, evaluate_tasks, load_task, parse_tasks

    check_names("backend", [backend], ("transformers", "vllm"))
    requests = [] if tasks is None else parse_tasks(tasks, shots=shots)
    if requests:
        check_request(limit=limit, batch_size=batch_size)
    elif limit is not None or shots is not None:
        raise TrisectError("--limit and --shots are about tasks: add --tasks paper, or another.")
    prepared = [load_task(request) for request in requests]  # before the model: the hub may be out of reach
    if backend == "vllm":
        from trisect.models.checkpoint import look_at
        from trisect.serve.server import Engine

        with screen.quiet_libraries():
            loaded = look_at(model, trust_remote_code=loading.trust_remote_code)
        room = length or usual_length(loaded.model)
        engine = Engine(loaded.name, length=room, dtype=loading.dtype, tasks=bool(requests))
        by_engine: tuple[dict[str, Any], dict[str, Any]] = {"losses_of": engine.losses}, {"lm": engine.lm}
    else:
        loaded, by_engine = screen.load(model, loading), ({}, {})
    measured: dict[str, Any] = {"model": model, **({} if backend == "transformers" else {"backend": backend})}
    if data is not None or not requests:
        choice: Any = {"windows": windows, "length": length or usual_length(loaded.model), "sampling": sampling}
        tokens = evaluation_tokens(data or "builtin", loaded.tokenizer, **choice, seed=seed)
        with screen.progress() as report:
            how: Any = {"batch_size": batch_size, "progress": partial(report, "perplexity")}
            found = perplexity(loaded.model, tokens, **how, **by_engine[0])
        size = f"{found.windows} window{'s' * (found.windows > 1)} of {found.length} tokens"
        screen.say(f"perplexity {found.perplexity:.4f} on {found.data} ({size})")
        measured |= asdict(found)
    if requests:
        with screen.quiet_libraries(), screen.progress() as report:
            how = {"limit": limit, "batch_size": batch_size, "progress": report, **by_engine[1]}
            scores = evaluate_tasks(loaded.model, loaded.tokenizer, prepared, **how)
        _show_scores(scores)
        measured["tasks"] = scores.to_dict()
    screen.keep_measurement(json, measured)
    screen.say_next(f"trisect report RUN --measured {screen.quoted(json)}")


def _show_scores(results: Any) -> None:
    """Print one row per task, then the average."""
    limited = "" if results.limit is None else f" (--limit {results.limit})"
    rows = []
    for score in results.scores:
        metric = score.metric.removesuffix(",none").replace(",", ", ")  # of lm-eval's `metric,filter`
        counts = str(score.shots), f"{score.questions} of {score.available}"
        rows.append((score.task, metric, *counts, score.value, score.stderr))
    rows.append(("average", "", "", "", results.average, results.average_stderr))
    shown = [(*row[:4], f"{row[4]:.4f}", "" if row[5] is None else f"+-{row[5]:.4f}") for row in rows]
    screen.say_table(("task", "metric"), shown, right=("shots", f"questions{limited}", "score", "error"))
