"""Measure: `trisect eval`, `inspect`, `bench`, `compare` and `report`."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE

from trisect import models
from trisect.commands import _screen as screen
from trisect.commands._options import Device, Json, Length, LoadOptions, Model, TrustRemoteCode, argument, option, verb
from trisect.config.settings import RUNNING, parse_align, parse_names
from trisect.errors import TrisectError, check_names
from trisect.records.shapes import ModelShape
from trisect.support.files import atomic_write_text


@verb("Measure")
def eval_(
    model: Model,
    loading: LoadOptions,
    data: Annotated[str | None, option("A text. (default: builtin, or none with --tasks)", "NAME|FILE")] = None,
    length: Length = None,
    windows: Annotated[int | None, option("Number of windows. (default: all)")] = None,
    tasks: Annotated[str | None, option("lm-eval's, or paper, zero-shot, quick.", "PRESET|TASK[:SHOTS],...")] = None,
    limit: Annotated[int | None, option("Questions per task, for a quick look. (default: all)")] = None,
    shots: Annotated[int | None, option("Examples in each prompt. (default: as the preset or lm-eval has it)")] = None,
    batch_size: Annotated[int | None, option("Windows per pass; chosen for you by default.", panel=RUNNING)] = None,
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
        from trisect.serve import Engine

        with screen.quiet_libraries():
            loaded = look_at(model, trust_remote_code=loading.trust_remote_code)
        room = usual_length(loaded.model) if length is None else length
        engine = Engine(loaded.name, length=room, dtype=loading.dtype, tasks=bool(requests))
        by_engine: tuple[dict[str, Any], dict[str, Any]] = {"losses_of": engine.losses}, {"lm": engine.lm}
    else:
        loaded, by_engine = screen.load(model, loading), ({}, {})
    measured: dict[str, Any] = {"model": model, **({} if backend == "transformers" else {"backend": backend})}
    if data is not None or not requests:
        room = usual_length(loaded.model) if length is None else length
        tokens = evaluation_tokens(data or "builtin", loaded.tokenizer, windows=windows, length=room)
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


@verb("Measure")
def inspect(model: Model, json: Json = None, trust_remote_code: TrustRemoteCode = False) -> None:
    """Show a model's widths, parameters, cache and FLOPs; no weights are read.

    What was removed from a model: trisect inspect small
    Its numbers as a file: trisect inspect small --json sizes.json
    """
    from trisect.plan import budget_of, compare
    from trisect.report.terminal import compression_table

    with screen.quiet_libraries():
        current, original, info = models.read_shape(model, trust_remote_code=trust_remote_code)
    name, method, packing = screen.quoted(model), info.get("method"), info.get("quantization")
    held = ""
    if packing is not None:
        maps = (f"{count} linear maps in {bits} bits" for bits, count in packing["modules_by_bits"].items())
        held = f"; {', '.join(maps)} ({packing['backend']})"
    screen.say(f"{model}: family {info.get('family')}, {len(current.layers)} layers, method {method or 'none'}" + held)
    screen.say(compression_table(original, current, labels=("original", "now")))
    if info["dropped_layers"]:
        screen.say(f"dropped layers, as they were numbered: {', '.join(map(str, info['dropped_layers']))}")
    for line in info["left_whole"]:
        screen.say(f"left whole: {line}")
    now, was = budget_of(current), budget_of(original)
    facts = {**asdict(now), "ratio": compare(was, now).ratio, "layers": _widths(current)}
    facts["original"] = {**asdict(was), "layers": _widths(original)}
    screen.keep_measurement(json, {"model": model, **facts, **info})
    screen.say_next(f"trisect eval {name}" if method else f"trisect compress {name} -o OUT --ratio 0.25")


def _widths(shape: ModelShape) -> list[dict[str, int]]:
    """Layer by layer; of mixtures also how many experts there are and how many of them a token meets."""
    plain, mixture = ("qk", "vo", "mlp"), ("experts", "top_k", "shared")
    names = [(*plain, *mixture) if layer.experts else plain for layer in shape.layers]
    return [{name: getattr(layer, name) for name in known} for layer, known in zip(shape.layers, names, strict=True)]


@verb("Measure")
def bench(
    model: Model,
    phase: Annotated[str, option("Of prefill, decode.", "LIST")] = "prefill,decode",
    batch: Annotated[str, option("Sequences at once, e.g. 1,2,4,8.", "LIST")] = "1",
    length: Annotated[str | None, option("Tokens of a prompt. (default: 1024 at most)", "LIST")] = None,
    new: Annotated[int | None, option("Tokens to decode behind the prompt. (default: 128 at most)")] = None,
    graphs: Annotated[bool, option("Decode by CUDA graphs.")] = False,
    compile: Annotated[bool, option("Run through torch.compile.")] = False,
    repeats: Annotated[int, option("Prefills to time.")] = 10,
    steps: Annotated[int | None, option("Decoding steps to time, from the middle. (default: all)")] = None,
    latency_table: Annotated[Path | None, option("Instead: time components, for --budget latency.", "FILE")] = None,
    align: Annotated[str, option("Grid of the widths of --latency-table.", "32|16|8|none")] = "16",
    seed: Annotated[int, option("Seed of prompts and of the dense model's weights.")] = 0,
    dtype: Annotated[str | None, option("By default bfloat16 on a GPU, else float32.", "DTYPE", panel=RUNNING)] = None,
    device: Device = "cpu",
    json: Json = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Time a model beside the dense one that it was made from, with the limits beside each figure.

    A compressed model beside its dense one: trisect bench small --json speed.json
    Decoding by CUDA graphs, at two batch sizes: trisect bench small --device cuda --graphs --batch 1,8
    Times for --budget latency: trisect bench small --latency-table times.json --phase decode
    """
    from trisect.bench import latency, measure, rows, sweep

    how: Any = {"trust_remote_code": trust_remote_code}
    lengths, new = sweep.fitting_lengths(model, () if length is None else _numbers(length, "--length"), new, **how)
    cases = sweep.Sweep(
        phases=tuple(dict.fromkeys(parse_names(phase))),
        batches=_numbers(batch, "--batch"),
        lengths=lengths,
        new=new,
        modes=("plain",) if not (graphs or compile) else ("graphs",) * graphs + ("compile",) * compile,
        device=device,
        dtype=dtype or ("bfloat16" if device.startswith("cuda") else "float32"),
    )
    effort = measure.Effort(repeats=repeats, steps=steps, seed=seed)
    if latency_table is not None:
        step = parse_align(align)
        with screen.quiet_libraries(), screen.progress() as report:
            how |= {"align": step, "repeats": repeats, "progress": partial(report, "timing components")}
            said = latency.write_table(model, cases, latency_table, **how)
        screen.say(f"{latency_table}: {said}")
        table = screen.quoted(latency_table)
        screen.say_next(f"trisect plan MODEL --ratio 0.25 --budget latency --latency-table {table}")
        return
    with screen.quiet_libraries():
        found = sweep.time_beside_dense(model, cases, effort=effort, **how, say=screen.stderr().print)
    notes, failed = rows.notes_for(found["rows"]), rows.failures(found["rows"])
    for title, (header, lines) in rows.tables(found["rows"]):
        style: Any = {"title": title, "box": SIMPLE, "padding": (0, 1, 0, 0)}
        screen.say_table(header[:3], lines, right=header[3:], **style)
    screen.say(*map(sweep.described, failed), *notes)
    screen.keep_measurement(json, {**found, "rows": rows.related(found["rows"]), "notes": notes})
    screen.say_next(f"trisect report {screen.quoted(model)} --measured {screen.quoted(json)}")
    if failed:
        raise typer.Exit(code=1)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    pieces = tuple(dict.fromkeys(parse_names(text)))
    if not pieces or not all(piece.isdigit() and int(piece) > 0 for piece in pieces):
        raise TrisectError(f"{option} takes whole numbers such as 1,2,4, not {text!r}.")
    return tuple(map(int, pieces))


@verb("Measure")
def compare(
    recipe: Annotated[Path, argument("YAML; see docs/comparison.md.", "RECIPE")],
    out: Annotated[Path | None, option("Folder of results. (default: ../results/NAME)", "DIR")] = None,
    only: Annotated[list[str] | None, option("Run this method or model only; may be repeated.", "NAME")] = None,
    keep_errors: Annotated[bool, option("Do not try cells again that failed before.")] = False,
    dry_run: Annotated[bool, option("Check the recipe and show its table as it stands; write nothing.")] = False,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Run every cell of a recipe that has no receipt yet, and write one table and figures.

    A recipe to start from: trisect init compare -o recipe.yaml
    What a recipe would run: trisect compare experiments/recipes/main-stories15m.yaml --dry-run
    Run what is missing, on a GPU: trisect compare recipe.yaml -o results --device cuda
    """
    from trisect.compare import Folder, load_recipe, results, run_recipe

    loaded = load_recipe(recipe)
    beside = recipe.parent.parent / "results" / loaded.name if recipe.parent.name == "recipes" else Path(loaded.name)
    folder = Folder(path=out or beside)
    if dry_run:
        screen.say(results.page(loaded, results.outcomes_of(loaded, folder)), "Nothing was run.")
        return
    how: dict[str, Any] = {"device": device, "only": only or (), "keep_errors": keep_errors}
    with screen.quiet_libraries(), screen.progress() as report:
        counts = run_recipe(loaded, folder, **how, progress=report, say=screen.stderr().print)
    models = results.outcomes_of(loaded, folder)
    written = results.write_results(loaded, models, folder, recipe)
    failed = sum(outcome.error is not None for model in models for outcome in model)
    done = {"ran": len(counts.ran), "done": counts.done, "failed": failed}
    elsewhere = f", {counts.elsewhere} run by other processes" if counts.elsewhere else ""
    screen.say(f"{loaded.name}: {len(counts.ran)} cells run, {counts.done} done before, {failed} failed{elsewhere}")
    table = folder.path / "table.md"
    screen.say(table.read_text(encoding="utf-8").strip(), f"Table: {table}" + ("" if written else " (unchanged)"))
    screen.keep_measurement(json, {"recipe": loaded.name, **done, "measurements": list(results.measurements(models))})
    if failed:
        screen.say_next("the same command tries the failed cells again (--keep-errors leaves them)")
        raise typer.Exit(code=1)


@verb("Measure")
def report(
    runs: Annotated[list[Path], argument("Folders that `trisect compress -o` wrote.", "RUN")],
    out: Annotated[Path, option("The page.", "FILE")] = Path("report.html"),
    measured: Annotated[list[Path] | None, option("What --json wrote, besides RUN/measurements.", "FILE")] = None,
) -> None:
    """Write one self-contained page: what went, what it cost, where the time went, and every receipt.

    One page about a run: trisect report small -o report.html
    Two runs side by side, with what was measured later: trisect report small smaller --measured eval.json
    """
    from trisect.report import page
    from trisect.report.runs import read_runs

    page.check_output(out)
    with screen.quiet_libraries():
        found = read_runs(runs, measured or [])
    atomic_write_text(out, page.render(found, page.report_sections(found)))
    screen.say(f"Saved to {out}")
    screen.say_next(f"open {screen.quoted(out)} in a browser")
