"""Seven zero-shot tasks, 1000 questions each, by acc_norm: a quarter removed by several methods, three mixtures.

    .venv/bin/python experiments/zero_shot.py record                          # lm-eval's questions -> runs/requests
    python experiments/zero_shot.py answer [--workers 2] [--seconds 500]      # on a GPU, without lm-eval
    .venv/bin/python experiments/zero_shot.py score                           # -> experiments/results/tasks.json

Answers go to runs/answers, one file a row; what is there, or has a score, is not answered again. Calibration: 64
windows of 2048 tokens. BoolQ and WinoGrande have no acc_norm and count by acc.
"""

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import device_tasks
from tables import Entry, keep_row, known, rows_of, sourced, table
from trust import GEMMA, ROOT, Cell, compressed, gpu_workers, load

if TYPE_CHECKING:  # a GPU's machine has no matplotlib
    from figures import Plot

REQUESTS, ANSWERS = ROOT / "runs" / "requests", ROOT / "runs" / "answers"
FILE = "tasks.json"
TASKS = ("arc_easy", "arc_challenge", "boolq", "winogrande", "piqa", "hellaswag", "openbookqa")
QUESTIONS = 1000
MIXTURES = (["wikitext-2", "c4"], ["wikitext-2", "c4", "wikipedia"], ["c4", "wikipedia"])
"""Fixed before the first row was measured."""
METHODS: tuple[Cell, ...] = (
    {"method": "a3"},
    {"method": "a3+"},
    {"method": "a3+", "allocate": "balanced", "refine": True},
    {"method": "svd-llm"},
    {"method": "asvd"},
)
MODELS = ("smollm2-135m", GEMMA)
SECOND, LAST_ROW = "acc_norm,none", 60
"""lm-eval's name of what is reported where a task has it; seconds before the end after which none is begun."""


def cells(device: str) -> list[Cell]:
    """Every model, mixture and method, the dense model first."""
    found = []
    for model in MODELS:
        base = {"model": model, "device": device, "seed": 0, "length": 2048, "windows": 64, "ratio": 0.25}
        found.append({**base, "method": "dense", "windows": 0, "ratio": 0.0, "calibration": []})
        found += [{**base, "calibration": mixture, **method} for mixture in MIXTURES for method in METHODS]
    return found


def name_of(cell: Cell) -> str:
    return " ".join(filter(None, [cell["model"], _label(cell), "+".join(cell["calibration"])]))


def path_of(cell: Cell) -> Path:
    return ANSWERS / f"{name_of(cell).replace(' ', '_')}.json"


def record() -> None:
    """What lm-eval asks each model."""
    REQUESTS.mkdir(parents=True, exist_ok=True)
    for model in MODELS:
        source = model
        if model == GEMMA:
            from gemma import find_gemma

            source = str(find_gemma())
        asked = device_tasks.record(source, tasks=",".join(f"{task}:0" for task in TASKS), limit=QUESTIONS)
        device_tasks.write_compact(REQUESTS / f"{model}.json", asked)
        print(f"{model}: {sum(len(call['requests']) for call in asked['calls'])} requests", flush=True)


def answer(cell: Cell) -> str:
    """Compress as the cell says, and answer every question."""
    from trisect.support.receipt import build_receipt

    recorded, loaded, started = device_tasks.read_requests(REQUESTS / f"{cell['model']}.json"), load(cell), time.time()
    found = compressed(cell, loaded)
    timings = {"compress": time.time() - started}
    model = loaded.model if found is None else found.model
    batch = 16 if cell["model"] == GEMMA else 64  # its vocabulary: 64 questions of 600 tokens are 45 GB of logits
    answers = device_tasks.answer_calls(model, recorded, batch_size=batch)
    timings["answer"] = time.time() - started - timings["compress"]
    token_hash = None if found is None else found.receipt["token_hash"]
    receipt = build_receipt(cell, seed=recorded["seed"], token_hash=token_hash, timings=timings)
    ANSWERS.mkdir(parents=True, exist_ok=True)
    about = {"cell": cell, "receipt": {key: value for key, value in receipt.items() if key != "recipe"}}
    device_tasks.write_answers(path_of(cell), recorded, answers, about)
    return f"{name_of(cell)}: {timings}"


def answer_missing(given: argparse.Namespace) -> None:
    end, done = time.time() + given.seconds, known(FILE)
    missing = [c for c in cells(given.device) if name_of(c) not in done and not path_of(c).exists()]
    missing = [c for c in missing if given.model in (None, c["model"])]
    missing = [c for c in missing if given.method is None or c["method"] in given.method]
    with gpu_workers(given.workers) as pool:
        waiting = [pool.submit(_before, end - LAST_ROW, cell) for cell in missing]
        for one in waiting:
            print(one.exception() or one.result(), flush=True)


def _before(end: float, cell: Cell) -> str:
    return answer(cell) if time.time() < end else f"{name_of(cell)}: no time"


def score() -> None:
    """Let lm-eval score every file of answers."""
    for path in sorted(ANSWERS.glob("*.json")):
        cell = json.loads(path.read_text(encoding="utf-8"))["about"]["cell"]
        recorded = device_tasks.read_requests(REQUESTS / f"{cell['model']}.json")
        answers, about = device_tasks.read_answers(path, recorded)
        found = device_tasks.score(recorded, answers)
        scores = {task: _accuracy(entry) for task, entry in found["scores"].items()}
        about |= {"limit": QUESTIONS, "lm_eval": found["lm_eval"], "requests": recorded["sha256"], "scores": scores}
        keep_row(FILE, {"name": name_of(cell), **about})
        print(f"{name_of(cell)}: {_average(scores)[0]:.4f}", flush=True)


def _accuracy(entry: Entry) -> Entry:
    value = entry["other"].get(SECOND, entry["value"])
    error = math.sqrt(value * (1 - value) / (entry["questions"] - 1))
    metric = SECOND if SECOND in entry["other"] else entry["metric"]
    return {"metric": metric, "value": value, "stderr": error, "questions": entry["questions"]}


def _average(scores: Entry) -> tuple[float, float]:
    """The plain mean of the tasks, and its standard error: their questions are independent."""
    values = list(scores.values())
    error = math.sqrt(sum(each["stderr"] ** 2 for each in values)) / len(values)
    return sum(each["value"] for each in values) / len(values), error


def _label(cell: Cell) -> str:
    return f"{cell['method']} best" if cell.get("refine") else str(cell["method"])


def average_table() -> str:
    """Mean accuracy by model, mixture and method."""
    rows = rows_of(FILE)
    names = {_label(method): method for method in METHODS}
    found = {(r["cell"]["model"], _label(r["cell"]), "+".join(r["cell"]["calibration"])): r for r in rows}
    lines = []
    for model in MODELS:
        for mixture in MIXTURES:
            line = [found.get((model, name, "+".join(mixture))) for name in names]
            dense = found.get((model, "dense", ""))
            lines.append([model, ", ".join(mixture), *(_shown(row) for row in (dense, *line))])
    header = ["average accuracy, %", "calibrated on", "dense", *names]
    return sourced(table(header, lines), rows, "python experiments/zero_shot.py answer")


def _shown(row: Entry | None) -> str:
    return "-" if row is None else _percent(*_average(row["scores"]))


def _percent(value: float, error: float) -> str:
    return f"{100 * value:.1f} +- {100 * error:.1f}"


def every_table() -> str:
    """Every task, a line per model, mixture and method."""
    rows = sorted(rows_of(FILE), key=lambda row: (row["cell"]["model"], row["cell"]["calibration"], row["name"]))
    lines = [
        [
            row["cell"]["model"],
            ", ".join(row["cell"]["calibration"]) or "-",
            _label(row["cell"]),
            *(_percent(row["scores"][task]["value"], row["scores"][task]["stderr"]) for task in TASKS),
        ]
        for row in rows
    ]
    made = table(["accuracy, %", "calibrated on", "method", *TASKS], lines)
    return sourced(made, rows, "python experiments/zero_shot.py score")


def tasks_figure(plot: "Plot") -> None:
    """SmolLM2's mean accuracy over all mixtures."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows_of(FILE):
        if row["cell"]["model"] == MODELS[0]:
            found[_label(row["cell"])].append(100 * _average(row["scores"])[0])
    averages = {name: mean(values) for name, values in found.items()}
    plot.bars(dict(sorted(averages.items(), key=lambda pair: -pair[1])))
    plot.label(
        f"{MODELS[0]}, 25% removed", "average accuracy of seven tasks, mean of three mixtures (%)", "", legend=False
    )


TABLES = {"tasks": average_table, "all-tasks": every_table}
FIGURES = {"tasks": tasks_figure}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["record", "answer", "score"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--method", action="append", help="only rows of this one; may be given several times")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing in the last minute of it")
    given = parser.parse_args()
    if given.verb == "answer":
        answer_missing(given)
    else:
        {"record": record, "score": score}[given.verb]()


if __name__ == "__main__":
    sys.exit(main())
