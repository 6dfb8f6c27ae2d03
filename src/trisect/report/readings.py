"""Numbers about models, from receipts and from what `--json` of compress, eval, quantize and bench wrote."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.report.receipts import count, mapping, number, text
from trisect.report.records import AFTER, BEFORE, LATENCY, PERPLEXITY, SPEED, TASK, Quantity, Reading
from trisect.support.checks import read_json
from trisect.support.receipt import measured_perplexities


def read_measurement(path: Path) -> list[Reading]:
    """All numbers of one file; an error says so where it holds none."""
    data = mapping(read_json(path), f"{path}")
    where = str(path)
    found = [*_bench(data, where), *_eval(data, where), *_both_sides(data, where)]
    if not found:
        raise TrisectError(
            f"{path} holds no measurement; give what --json of `trisect eval`, compress, quantize or bench "
            "wrote."
        )
    return found


def readings_of_receipts(receipts: tuple[dict[str, Any], ...], where: Path) -> list[Reading]:
    """What a run's receipts say of the dense model and of the run itself, not of what lay between."""
    found: list[Reading] = []
    for depth, receipt in enumerate(receipts):
        tunings = [mapping(entry, f"{where}: a tuning") for entry in receipt.get("tuning") or []]
        # Once tuned or quantised, it is no longer the model that was measured after compressing.
        final = depth == 0 and not tunings
        for row in measured_perplexities(receipt):
            for side in (BEFORE, AFTER) if final else (BEFORE,):
                if side in mapping(row, f"{where}: perplexity"):
                    found.append(_perplexity(row[side], f"{where}: perplexity", model="", side=side))
        if depth == 0 and tunings:
            for entry in tunings[-1].get("held_out") or []:
                held_out = mapping(entry, f"{where}: held-out text")
                found.append(_perplexity(held_out.get(AFTER), f"{where}: tuning", model="", side=AFTER))
    return found


def _both_sides(data: dict[str, Any], where: str) -> Iterator[Reading]:
    """`compress` and `quantize`: the model that was read, and the folder that was written."""
    out = data.get("out")
    if not isinstance(out, str):
        return
    for row in measured_perplexities(data):
        for side, model in ((BEFORE, text(data.get("model"), where)), (AFTER, out)):
            if isinstance(row, dict) and side in row:
                yield _perplexity(row[side], where, model=model)


def _eval(data: dict[str, Any], where: str) -> Iterator[Reading]:
    model = data.get("model")
    if not isinstance(model, str):
        return
    if not isinstance(data.get("perplexity"), dict | None):
        yield _perplexity(data, where, model=model)
    tasks = data.get("tasks")
    if isinstance(tasks, dict):
        yield from _tasks(tasks, where, model=model)


def _perplexity(entry: Any, where: str, *, model: str, side: str | None = None) -> Reading:
    entry = mapping(entry, where)
    data = Path(text(entry.get("data"), where)).name
    size = f"{entry['windows']} windows of {entry.get('length')} tokens" if "windows" in entry else ""
    quantity = Quantity(
        kind=PERPLEXITY, name=f"perplexity, {data}", detail=size, key=text(entry.get("token_hash"), where)
    )
    # JSON has no infinity: a perplexity beyond every float was written as null.
    found = entry.get("perplexity", "")
    value = math.inf if found is None else number(found, where)
    return Reading(model=model, quantity=quantity, value=value, side=side)


def _tasks(tasks: dict[str, Any], where: str, *, model: str) -> Iterator[Reading]:
    scores = mapping(tasks.get("scores"), f"{where}: tasks")
    asked = []
    for name, entry in scores.items():
        entry = mapping(entry, f"{where}: {name}")
        metric = text(entry.get("metric"), where).removesuffix(",none")
        detail = f"{metric}, {entry.get('shots')} shots, {entry.get('questions')} questions"
        asked.append(f"{name} ({detail})")
        quantity = Quantity(kind=TASK, name=name, detail=detail)
        value, error = number(entry.get("value"), f"{where}: {name}"), _error(entry.get("stderr"), where)
        yield Reading(model=model, quantity=quantity, value=value, error=error)
    if len(scores) > 1:
        # Averages compare where the same questions were asked.
        average = Quantity(kind=TASK, name=f"average of {len(scores)} tasks", key="; ".join(asked))
        value, error = (
            number(tasks.get("average"), f"{where}: average"),
            _error(tasks.get("average_stderr"), where),
        )
        yield Reading(model=model, quantity=average, value=value, error=error)


def _error(value: Any, where: str) -> float | None:
    """A standard error; one question has none."""
    return None if value is None else number(value, f"{where}: a standard error")


def _bench(data: dict[str, Any], where: str) -> Iterator[Reading]:
    """Dense and compressed rows of a checkpoint; rows at other widths are about no run."""
    rows = data.get("rows")
    for row in rows if isinstance(rows, list) else []:
        row = mapping(row, f"{where}: a row")
        case = mapping(row.get("case"), f"{where}: the case of a row")
        kind, asked = (text(case.get(key), f"{where}: a case") for key in ("kind", "asked"))
        side = {("dense", ""): BEFORE, ("trisect", "checkpoint"): AFTER}.get((kind, asked))
        if side is None or "error" in row:
            continue
        model, name, detail = _setting(case, f"{where}: a case")
        times = mapping(row.get("times"), f"{where}: times")
        speed = number(row.get("tokens_per_second"), f"{where}: tokens per second")
        values = {SPEED: (speed, "tokens/s"), LATENCY: (1000 * number(times.get("p50"), where), "ms")}
        for measured, (value, unit) in values.items():
            quantity = Quantity(kind=measured, name=name, detail=detail, unit=unit)
            yield Reading(model=model, quantity=quantity, value=value, side=side)


def _setting(case: dict[str, Any], where: str) -> tuple[str, str, str]:
    """The model, what was timed, and how."""
    words = {key: text(case.get(key), where) for key in ("subject", "phase", "attention", "mode", "dtype")}
    batch, length, new = (count(case.get(key), where) for key in ("batch", "length", "new"))
    size = f"{batch} x {length}" + (f" + {new}" if new else "")
    how = f"{words['attention']}, {words['mode']}, {words['dtype']}, {text(case.get('device'), where)}"
    return words["subject"], f"{words['phase']}, {size} tokens", f"{how}; random weights of the same shape"
