"""The CSV: one line per cell and measurement, for spreadsheets and other programs."""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

from trisect.compare.outcomes import ModelOutcome, Outcome, Row

COLUMNS = (
    *("model", "method", "parts", "calibration", "ratio", "removed", "removed_of", "missed", "zeros"),
    *("removed_decoder", "removed_kv", "removed_flops", "kv_bytes_per_token"),
    *("data", "metric", "value", "increase", "error"),
)


def csv_text(models: Sequence[ModelOutcome]) -> str:
    """The whole file."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(measurements(models))
    return out.getvalue()


def measurements(models: Sequence[ModelOutcome]) -> Iterator[dict[str, Any]]:
    """Every number of the table, with all that belongs to it."""
    for model in models:
        yield from _cell(model, None, model.dense)
        for row in model.rows:
            for outcome in row.cells.values():
                yield from _cell(model, row, outcome)


def _cell(model: ModelOutcome, row: Row | None, outcome: Outcome) -> Iterator[dict[str, Any]]:
    fixed = _fixed(model, row, outcome)
    if outcome.receipt is None:
        yield {**fixed, "error": outcome.error or "not run"}
        return
    for number, text in enumerate(model.model.evaluations):
        yield {
            **fixed,
            "data": text.name,
            "metric": "perplexity",
            "value": outcome.perplexity(number),
            "increase": model.increase(outcome, number),
        }
    dense = model.dense.accuracies()
    for task, accuracy in outcome.accuracies().items():
        increase = accuracy - dense[task] if task in dense else None
        yield {**fixed, "data": task, "metric": "accuracy", "value": accuracy, "increase": increase}


def _fixed(model: ModelOutcome, row: Row | None, outcome: Outcome) -> dict[str, Any]:
    data: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    data |= {"model": model.model.name, "method": "dense", "ratio": outcome.cell.ratio}
    if row is not None:
        data |= {
            "method": row.method.label,
            "parts": ",".join(row.parts),
            "calibration": row.calibration.name,
        }
    if outcome.receipt is not None:
        data["kv_bytes_per_token"] = outcome.receipt["counts"]["kv_bytes_per_token"]
        if row is not None:
            data |= {
                "removed": outcome.removed(),
                "removed_of": outcome.removed_of,
                "missed": "yes" if outcome.missed else "no",
                "removed_decoder": outcome.removed("decoder"),
                "zeros": outcome.removed("zeros"),
                "removed_kv": outcome.removed("kv_bytes_per_token"),
                "removed_flops": outcome.removed("flops"),
            }
    return data
