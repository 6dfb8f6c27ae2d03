"""The parts of the page that are text and tables."""

import json
import re
from collections.abc import Sequence
from typing import Any

from trisect.plan.budget import budget_of, compare
from trisect.report.cells import plain_table, scrolling, sortable, value_cell
from trisect.report.figures import name_of
from trisect.report.markup import Markup, join, tag
from trisect.report.numbers import count, percent
from trisect.report.records import LATENCY, SIZE, TASK, Run, Sample

CALIBRATION = ("source", "samples", "length", "sampling", "seed")
PROVENANCE = ("date", "trisect", "commit", "python", "token_hash")


def run_table(runs: Sequence[Run]) -> Markup:
    """One row per run, to be sorted by any column."""
    shared = [
        quantity
        for quantity in dict.fromkeys(fact.quantity for run in runs for fact in run.facts)
        if quantity.kind not in (SIZE, LATENCY) and sum(run.fact(quantity) is not None for run in runs) > 1
    ]
    # Many tasks make a table that nobody can read: their average comes last, and says it for all.
    tasks = [quantity for quantity in shared if quantity.kind == TASK]
    shared = [quantity for quantity in shared if quantity not in tasks[:-1]]
    header = ["run", "made from", "method", "removed", "parameters", "KV bytes", "seconds"]
    header += [
        f"{quantity.name} ({quantity.unit})" if quantity.unit else quantity.name for quantity in shared
    ]
    rows = []
    for run in runs:
        old, new = budget_of(run.before), budget_of(run.after)
        ratio, seconds = compare(old, new).ratio, sum(run.timings.values())
        cells = [
            tag("td", run.name),
            tag("td", name_of(run.source)),
            tag("td", run.method),
            sortable(ratio, percent(ratio)),
            sortable(new.parameters, count(new.parameters)),
            sortable(new.kv_bytes_per_token, f"{new.kv_bytes_per_token:,}"),
            sortable(seconds, f"{seconds:,.1f}"),
        ]
        for quantity in shared:
            fact = run.fact(quantity)
            cells.append(value_cell(fact.after if fact else None, quantity))
        rows.append(tag("tr", *cells))
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in header)))
    return scrolling(tag("table", head, tag("tbody", *rows), class_="sortable"))


def samples(found: Sequence[Sample]) -> Markup:
    """Continuations side by side."""
    pieces = []
    for sample in found:
        texts = [
            tag("div", tag("h4", name), tag("p", tag("b", sample.prompt), text, class_="sample"))
            for name, text in sample.texts
        ]
        pieces.append(tag("div", *texts, class_="grid samples"))
    return join(*pieces)


def calibration(runs: Sequence[Run]) -> Markup:
    """What the solvers saw, and what ran."""
    rows: dict[str, list[object]] = {}
    for number, run in enumerate(runs):
        receipt = run.compression
        chosen = (receipt.get("recipe") or {}).get("calibration")
        data = chosen if isinstance(chosen, dict) else {}
        values: dict[str, Any] = {f"calibration {key}": data.get(key) for key in CALIBRATION}
        values |= {key.replace("_", " "): receipt.get(key) for key in PROVENANCE}
        values |= {**(receipt.get("versions") or {}), **(receipt.get("hardware") or {})}
        values["fine-tuned"] = f"{len(run.tunings)} times" if run.tunings else None
        for key, value in values.items():
            if value is not None:
                rows.setdefault(str(key), ["-"] * len(runs))[number] = str(value)
    return plain_table(("", *(run.name for run in runs)), ([key, *values] for key, values in rows.items()))


def notes(runs: Sequence[Run]) -> Markup | None:
    """What the solvers wanted people to know."""
    rows = [
        (run.name, loss.layer, loss.component.upper(), loss.note)
        for run in runs
        for loss in run.losses
        if loss.note
    ]
    if not rows:
        return None
    table = plain_table(("run", "layer", "component", "note"), rows)
    return tag("details", tag("summary", f"Notes of the solvers ({len(rows)})"), table)


def receipts(runs: Sequence[Run]) -> Markup:
    """Everything, as it was written."""
    pieces = []
    for run in runs:
        text = _written(run.receipts[0])
        folded = tag("summary", f"receipt.json of {run.name}")
        pieces.append(tag("details", folded, tag("pre", text, tabindex="0")))
    return join(*pieces)


def _written(receipt: dict[str, Any]) -> str:
    """JSON with a line for every entry, and one line for a list of numbers."""
    text = json.dumps(receipt, indent=2)
    # A line break in a text is written as two letters, so this one is never inside of it.
    return re.sub(r"\[\n[-+.,\w\s]*\]", lambda found: " ".join(found[0].split()), text)
