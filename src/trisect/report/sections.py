"""The parts of the page that are text and tables."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from trisect.plan.budget import budget_of, compare
from trisect.report.figures import name_of
from trisect.report.markup import Markup, join, tag
from trisect.report.numbers import byte_count, count, percent, short
from trisect.report.records import LATENCY, PERPLEXITY, SIZE, SPEED, TASK, Fact, Quantity, Run, Sample

NOT_MEASURED = tag("span", "not measured", class_="none")
HINTS = {
    PERPLEXITY: ("perplexity", "`trisect eval MODEL --data wikitext2 --json F` for the run and its original"),
    TASK: ("tasks", "`trisect eval MODEL --tasks quick --json F` for the run and its original"),
    SPEED: ("speed", "`trisect bench RUN --json F`"),
}
"""How to measure what was not."""
CALIBRATION = ("source", "samples", "length", "sampling", "seed")
PROVENANCE = ("date", "trisect", "commit", "python", "token_hash")


def headline(runs: Sequence[Run]) -> Markup:
    """Before, after and change of everything that is known, and what is not."""
    quantities = [
        quantity
        for quantity in dict.fromkeys(fact.quantity for run in runs for fact in run.facts)
        if quantity.kind != LATENCY
    ]
    shared = _same_before(runs, quantities)
    rows = [_headline_row(quantity, runs, shared=shared) for quantity in quantities]
    known = {quantity.kind for quantity in quantities}
    rows += [_missing_row(*HINTS[kind], wide=3 * len(runs)) for kind in HINTS if kind not in known]
    own = ("after", "change") if shared else ("before", "after", "change")
    names = [tag("th", run.name, colspan=len(own), scope="colgroup") for run in runs]
    first = [tag("th", "before", scope="col")] if shared else []
    sides = [tag("th", side, scope="col") for _ in runs for side in own]
    top = tag("tr", tag("td"), tag("td") if shared else None, *names)
    head = tag("thead", top if len(runs) > 1 else None, tag("tr", tag("td"), *first, *sides))
    return _scrolling(tag("table", head, tag("tbody", *rows), class_="headline"))


def _same_before(runs: Sequence[Run], quantities: Sequence[Quantity]) -> bool:
    """Whether all runs start from the same numbers, so that one column is enough for them."""
    known = [
        {fact.before for run in runs if (fact := run.fact(quantity))} - {None} for quantity in quantities
    ]
    return len({run.source for run in runs}) == 1 and all(len(values) <= 1 for values in known)


def _missing_row(name: str, command: str, *, wide: int) -> Markup:
    hint = tag("small", *prose(f"{command}, then `trisect report --measured F`"))
    return tag("tr", tag("th", name, scope="row"), tag("td", NOT_MEASURED, hint, colspan=wide))


def prose(text: str) -> list[Markup | str]:
    """Text in which every second piece between backticks is code."""
    return [tag("code", piece) if at % 2 else piece for at, piece in enumerate(text.split("`"))]


def _headline_row(quantity: Quantity, runs: Sequence[Run], *, shared: bool) -> Markup:
    facts = [run.fact(quantity) or Fact(quantity=quantity, before=None, after=None) for run in runs]
    cells: list[Markup] = []
    if shared:
        before = next((fact.before for fact in facts if fact.before is not None), None)
        cells.append(_value(before, quantity))
        facts = [replace(fact, before=before) for fact in facts]
    for fact in facts:
        own = [] if shared else [_value(fact.before, quantity)]
        cells += [*own, _value(fact.after, quantity), _change(fact)]
    detail = tag("small", quantity.detail) if quantity.detail else None
    return tag("tr", tag("th", quantity.name, detail, scope="row"), *cells)


def _value(value: float | None, quantity: Quantity) -> Markup:
    if value is None:
        return tag("td", NOT_MEASURED)
    return tag("td", shown_value(value, quantity), class_="number", data_value=repr(value))


def shown_value(value: float, quantity: Quantity) -> str:
    """A number in the digits that its kind is read in."""
    if quantity.kind == PERPLEXITY:
        return f"{value:,.3f}"
    if quantity.kind == TASK:
        return f"{value:.4f}"
    if quantity.unit in ("tokens/s", "ms"):
        return f"{value:,.1f} {quantity.unit}"
    if quantity.unit == "B":
        return byte_count(value)
    return count(value) if value >= 1e3 else short(value)


def _change(fact: Fact) -> Markup:
    """Sizes by how much went, scores by their difference, the others by a factor."""
    if fact.before is None or fact.after is None or fact.before == 0:
        return tag("td")
    kind = fact.quantity.kind
    if kind == SIZE:
        text, better = f"{100 * (fact.after / fact.before - 1):+.1f}%", fact.after <= fact.before
    elif kind == TASK:
        text, better = f"{fact.after - fact.before:+.4f}", fact.after >= fact.before
    else:
        rises = kind == SPEED
        text = f"x{fact.after / fact.before:.3f}"
        better = fact.after >= fact.before if rises else fact.after <= fact.before
    return tag("td", text, class_=f"number {'better' if better else 'worse'}")


def run_table(runs: Sequence[Run]) -> Markup:
    """One row per run, to be sorted by any column."""
    shared = [
        quantity
        for quantity in dict.fromkeys(fact.quantity for run in runs for fact in run.facts)
        if quantity.kind != SIZE and sum(run.fact(quantity) is not None for run in runs) > 1
    ]
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
            _sortable(ratio, percent(ratio)),
            _sortable(new.parameters, count(new.parameters)),
            _sortable(new.kv_bytes_per_token, f"{new.kv_bytes_per_token:,}"),
            _sortable(seconds, f"{seconds:,.1f}"),
        ]
        for quantity in shared:
            fact = run.fact(quantity)
            cells.append(_value(fact.after if fact else None, quantity))
        rows.append(tag("tr", *cells))
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in header)))
    return _scrolling(tag("table", head, tag("tbody", *rows), class_="sortable"))


def plain_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """Any table; numbers are shown short and sorted by their full value."""
    body = [tag("tr", *(_plain_cell(entry) for entry in row)) for row in rows]
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in header)))
    return _scrolling(tag("table", head, tag("tbody", *body), class_="sortable"))


def _plain_cell(entry: object) -> Markup:
    return _sortable(entry, short(entry)) if isinstance(entry, int | float) else tag("td", entry)


def _sortable(value: float, text: str) -> Markup:
    return tag("td", text, class_="number", data_value=repr(value))


def _scrolling(table: Markup) -> Markup:
    """Wide tables scroll by themselves, by keyboard too."""
    return tag("div", table, class_="scroll", tabindex="0")


def samples(found: Sequence[Sample]) -> Markup:
    """Continuations side by side."""
    pieces = []
    for sample in found:
        texts = [
            tag("div", tag("h4", name), tag("p", tag("b", sample.prompt), text, class_="sample"))
            for name, text in sample.texts
        ]
        pieces.append(tag("div", *texts, class_="grid"))
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
        text = json.dumps(run.receipts[0], indent=2)
        folded = tag("summary", f"receipt.json of {run.name}")
        pieces.append(tag("details", folded, tag("pre", text, tabindex="0")))
    return join(*pieces)
