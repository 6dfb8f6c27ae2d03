"""Tasks for a machine without lm-eval: write the questions down here, answer them there, score them here.

    .venv/bin/python experiments/device_tasks.py record REQUESTS.json --model smollm2-135m --limit 300
    python experiments/device_tasks.py answer REQUESTS.json ANSWERS.json --device cuda [--method a3+ ...]
    .venv/bin/python experiments/device_tasks.py score REQUESTS.json ANSWERS.json OUT.json

`answer` needs torch, transformers, and src/ on PYTHONPATH. `score` gives what `trisect eval --tasks` would
have given: lm-eval makes its requests once more, and they must be the recorded ones.
"""

import argparse
import hashlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from likelihood import Answer, answer

from trisect.config import CalibrationConfig, CompressConfig
from trisect.errors import TrisectError
from trisect.models import load_model
from trisect.pipeline.run import compress
from trisect.support.files import atomic_write_text, check_writable, write_json
from trisect.support.receipt import build_receipt

FORMAT = 1
Recorded = dict[str, Any]
Pair = tuple[list[int], list[int]]
"""Token ids of a context, and of its continuation."""


@contextmanager
def answered_by(answers: Callable[[list[Pair]], list[Answer]]) -> Iterator[None]:
    """lm-eval's HFLM asks `answers` for log-likelihoods inside, once per task, not its model."""
    from lm_eval.models.huggingface import HFLM

    from trisect.support import replaced

    def ask(lm: Any, requests: list[Any], **_: Any) -> list[Answer]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        if any(len(context) + len(continuation) > lm.max_length + 1 for context, continuation in pairs):
            # HFLM would say so, and evaluate_tasks waits for it.
            logging.getLogger("lm_eval.models.huggingface").warning("Truncating a prompt.")
        answered = answers(pairs)
        for (texts, _, _), given in zip(requests, answered, strict=True):
            lm.cache_hook.add_partial("loglikelihood", texts, given)
        return answered

    def refuse(*_: Any, **__: Any) -> None:
        raise TrisectError("A task lets the model write, and nobody else can answer for it: leave it out.")

    with replaced((HFLM, "_loglikelihood_tokens", ask), (HFLM, "generate_until", refuse)):
        yield


def record(model: str, *, tasks: str, limit: int | None) -> Recorded:
    """All requests that lm-eval makes of a model for `tasks`, as token ids, call by call."""
    from local_tasks import evaluate_locally

    from trisect.evaluate.tasks import language_model, parse_tasks, quiet

    loaded = load_model(model)
    calls: list[list[Pair]] = []

    def note(pairs: list[Pair]) -> list[Answer]:
        calls.append(pairs)
        return [(0.0, False)] * len(pairs)

    with answered_by(note):
        results = evaluate_locally(loaded.model, loaded.tokenizer, tasks, limit=limit)
    names = [request.name for request in parse_tasks(tasks)]
    with quiet():
        max_length = language_model(loaded.model, loaded.tokenizer, batch_size=1).max_length
    return {
        "format": FORMAT,
        "model": model,
        "tasks": tasks,
        "limit": limit,
        "seed": results.seed,
        "lm_eval": results.lm_eval,
        "max_length": max_length,
        "vocabulary": content_hash(sorted(loaded.tokenizer.get_vocab().items())),
        "documents": {score.task: score.sha256 for score in results.scores},
        "sha256": content_hash(calls),
        "calls": [{"task": name, "requests": pairs} for name, pairs in zip(names, calls, strict=True)],
    }


def answer_calls(model: Any, recorded: Recorded, *, batch_size: int) -> list[list[Answer]]:
    """A model's answers to every call, each by itself, so that batches are those of lm-eval."""
    settings = {"batch_size": batch_size, "max_length": recorded["max_length"]}
    return [answer(model, call["requests"], **settings) for call in recorded["calls"]]


def write_answers(path: str | Path, recorded: Recorded, answers: list[list[Answer]], about: Any) -> None:
    """Answers with the hash of what was asked; `about` says who answered."""
    write_compact(path, {"requests": recorded["sha256"], "about": about, "answers": answers})


def score(recorded: Recorded, answers: list[list[Answer]]) -> dict[str, Any]:
    """lm-eval's scores for recorded requests, answered: `TaskResults.to_dict`."""
    from local_tasks import evaluate_locally

    loaded = load_model(recorded["model"])
    pending = list(zip(recorded["calls"], answers, strict=True))

    def replay(pairs: list[Pair]) -> list[Answer]:
        call, given = pending.pop(0)
        if [list(pair) for pair in pairs] != [list(pair) for pair in call["requests"]]:
            raise TrisectError(
                f"lm-eval asks other questions for {call['task']} than were recorded: the tokenizer, the "
                "documents or lm-eval itself has changed; record again, and answer again."
            )
        return [(float(value), bool(greedy)) for value, greedy in given]

    settings = {"limit": recorded["limit"], "seed": recorded["seed"]}
    with answered_by(replay):
        results = evaluate_locally(loaded.model, loaded.tokenizer, recorded["tasks"], **settings)
    return results.to_dict()


def read_requests(path: str | Path) -> Recorded:
    """A file that `record` wrote, its hash checked."""
    recorded: Recorded = json.loads(Path(path).read_text(encoding="utf-8"))
    if recorded.get("format") != FORMAT:
        raise TrisectError(f"{path} has format {recorded.get('format')!r}, not {FORMAT}: record it again.")
    if content_hash([call["requests"] for call in recorded["calls"]]) != recorded["sha256"]:
        raise TrisectError(f"{path} does not hold the requests that its hash is of: record it again.")
    return recorded


def read_answers(path: str | Path, recorded: Recorded) -> tuple[list[list[Answer]], Any]:
    """Answers and who gave them, if they are to these requests."""
    written = json.loads(Path(path).read_text(encoding="utf-8"))
    if written["requests"] != recorded["sha256"]:
        raise TrisectError(f"{path} answers other requests: run `answer` on this file of requests.")
    return written["answers"], written["about"]


def content_hash(value: Any) -> str:
    """sha256 of the compact JSON."""
    return hashlib.sha256(compact(value).encode()).hexdigest()


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def write_compact(path: str | Path, value: Any) -> None:
    atomic_write_text(path, compact(value) + "\n")


def run_record(options: argparse.Namespace) -> None:
    check_writable(options.requests)
    recorded = record(options.model, tasks=options.tasks, limit=options.limit)
    write_compact(options.requests, recorded)
    for call in recorded["calls"]:
        print(f"{call['task']}: {len(call['requests'])} requests")


def run_answer(options: argparse.Namespace) -> None:
    check_writable(options.answers)
    recorded = read_requests(options.requests)
    name = options.model or recorded["model"]
    loaded = load_model(name, dtype=options.dtype, device=options.device)
    receipt = None
    if options.method is not None:
        config = config_of(options)
        receipt = compress(loaded.model, config, tokenizer=loaded.tokenizer, curves=options.curves).receipt
    started = time.perf_counter()
    answers = answer_calls(loaded.model, recorded, batch_size=options.batch_size)
    timings = {"answer": time.perf_counter() - started}
    how = {"model": name, "dtype": str(loaded.model.dtype), "batch_size": options.batch_size}
    run = build_receipt(how, seed=recorded["seed"], token_hash=None, timings=timings)
    write_answers(options.answers, recorded, answers, {"receipt": run, "compression": receipt})


def run_score(options: argparse.Namespace) -> None:
    check_writable(options.out)
    recorded = read_requests(options.requests)
    answers, about = read_answers(options.answers, recorded)
    results = score(recorded, answers)
    asked = {key: value for key, value in recorded.items() if key != "calls"}
    write_json(options.out, {**results, "requests": asked, "answered": about})
    for task, entry in results["scores"].items():
        error = "" if entry["stderr"] is None else f" +-{entry['stderr']:.4f}"
        print(f"{task} {entry['value']:.4f}{error}")
    error = "" if results["average_stderr"] is None else f" +-{results['average_stderr']:.4f}"
    print(f"average {results['average']:.4f}{error}")


def config_of(options: argparse.Namespace) -> CompressConfig:
    """What the options say about compression, checked."""
    given = {"source": options.calibration, "samples": options.samples, "length": options.length}
    calibration = CalibrationConfig(**given, sampling=options.sampling, seed=options.seed)
    names = ("method", "ratio", "align", "parts", "allocate")
    chosen = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return CompressConfig.from_dict({**chosen, "calibration": calibration, "seed": options.seed})


def parser() -> argparse.ArgumentParser:
    lines = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = lines.add_subparsers(required=True)
    one = verbs.add_parser("record", help="write lm-eval's requests to a file")
    one.add_argument("requests", type=Path)
    one.add_argument("--model", default="smollm2-135m")
    one.add_argument("--tasks", default="zero-shot")
    one.add_argument("--limit", type=int)
    one.set_defaults(run=run_record)
    two = verbs.add_parser("answer", help="answer them with a model; needs no lm-eval")
    two.add_argument("requests", type=Path)
    two.add_argument("answers", type=Path)
    two.add_argument("--model", help="(default: the recorded one)")
    two.add_argument("--device", default="cpu")
    two.add_argument("--dtype")
    two.add_argument("--batch-size", type=int, default=16)
    two.add_argument("--method", help="compress first (default: leave the model as it is)")
    two.add_argument("--ratio", type=float)
    two.add_argument("--align", help="8, 16, 32 or none")
    two.add_argument("--parts", help="qk,ov,mlp or some of them")
    two.add_argument("--allocate")
    two.add_argument("--calibration", default="builtin")
    two.add_argument("--samples", type=int, default=128)
    two.add_argument("--length", type=int, default=2048)
    two.add_argument("--sampling", default="random")
    two.add_argument("--seed", type=int, default=0)
    two.add_argument("--curves", type=Path)
    two.set_defaults(run=run_answer)
    three = verbs.add_parser("score", help="let lm-eval score the answers")
    three.add_argument("requests", type=Path)
    three.add_argument("answers", type=Path)
    three.add_argument("out", type=Path)
    three.set_defaults(run=run_score)
    return lines


def main(*arguments: str) -> None:
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except TrisectError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
