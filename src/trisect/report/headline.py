"""The headline: before, after and change of everything that is known, and what is not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trisect.report.cells import NOT_MEASURED, prose, scrolling, shown_value, value_cell
from trisect.report.facts import FLOPS, KV_CACHE, PARAMETERS
from trisect.report.markup import Markup, join, tag
from trisect.report.records import LATENCY, PERPLEXITY, SIZE, SPEED, TASK, Fact, Quantity, Run

HINTS = {
    PERPLEXITY: ("perplexity", "`trisect eval MODEL --data wikitext2 --json F` for the run and its original"),
    TASK: ("tasks", "`trisect eval MODEL --tasks quick --json F` for the run and its original"),
    SPEED: ("speed", "`trisect bench RUN --json F`"),
}
"""How to measure what was not."""
LEADING_SIZES = (PARAMETERS, KV_CACHE, FLOPS)
TILES = 7
"""Changes that stand in large type above the table, for those who read nothing else."""
CERTAIN = 2.0
"""Standard errors that a difference must exceed before it is called better or worse."""
MOST_TILED = 2
"""Runs that have such: more are easier to compare in the table."""


def headline(runs: Sequence[Run]) -> Markup:
    """The changes that matter most, then the table of all."""
    quantities = [
        quantity
        for quantity in dict.fromkeys(fact.quantity for run in runs for fact in run.facts)
        if quantity.kind != LATENCY
    ]
    tiled = runs if len(runs) <= MOST_TILED else ()
    return join(*(_tiles(run, named=len(runs) > 1) for run in tiled), _table(runs, quantities))


def _tiles(run: Run, *, named: bool) -> Markup:
    tiles = []
    for fact in _leading(run):
        change = change_of(fact)
        if change is None or fact.before is None or fact.after is None:
            continue
        was, now = (shown_value(value, fact.quantity) for value in (fact.before, fact.after))
        text = tag("b", change.text, class_=change.css)
        chance = f"{change.error}, may be chance" if change.better is None else change.error
        error = tag("small", chance) if chance else None
        small = tag("small", f"{was} to {now}")
        tiles.append(tag("div", text, fact.quantity.name, small, error, class_="tile"))
    return join(tag("h4", run.name) if named else None, tag("div", *tiles[:TILES], class_="tiles"))


def _leading(run: Run) -> Iterator[Fact]:
    """The sizes that people pay for, the first text, the tasks' average (or the only task), the speeds."""
    kinds = {kind: [fact for fact in run.facts if fact.quantity.kind == kind] for kind in (*HINTS, SIZE)}
    yield from (fact for fact in kinds[SIZE] if fact.quantity in LEADING_SIZES)
    yield from kinds[PERPLEXITY][:1]
    yield from kinds[TASK][-1:]
    yield from kinds[SPEED]


def _table(runs: Sequence[Run], quantities: Sequence[Quantity]) -> Markup:
    """Before, after and change of everything that is known, and what is not."""
    shared = _same_before(runs, quantities)
    rows = [_row(quantity, runs, shared=shared) for quantity in quantities]
    known = {quantity.kind for quantity in quantities}
    own = ("after", "change") if shared else ("before", "after", "change")
    wide = len(own) * len(runs) + shared
    rows += [_missing_row(*HINTS[kind], wide=wide) for kind in HINTS if kind not in known]
    names = [tag("th", run.name, colspan=len(own), scope="colgroup") for run in runs]
    first = [tag("th", "before", scope="col")] if shared else []
    sides = [tag("th", side, scope="col") for _ in runs for side in own]
    top = tag("tr", tag("td"), tag("td") if shared else None, *names)
    head = tag("thead", top if len(runs) > 1 else None, tag("tr", tag("td"), *first, *sides))
    return scrolling(tag("table", head, tag("tbody", *rows), class_="headline"))


def _same_before(runs: Sequence[Run], quantities: Sequence[Quantity]) -> bool:
    """Whether one column is enough for what all runs start from; speeds are measured beside each run."""
    steady = [quantity for quantity in quantities if quantity.kind != SPEED]
    return len({run.source for run in runs}) == 1 and all(
        len(_befores(quantity, runs)) <= 1 for quantity in steady
    )


def _befores(quantity: Quantity, runs: Sequence[Run]) -> list[float]:
    """The different values that runs start from."""
    found = (fact.before for run in runs if (fact := run.fact(quantity)))
    return list(dict.fromkeys(value for value in found if value is not None))


def _row(quantity: Quantity, runs: Sequence[Run], *, shared: bool) -> Markup:
    facts = [run.fact(quantity) or Fact(quantity=quantity, before=None, after=None) for run in runs]
    befores = _befores(quantity, runs)
    several = len(befores) > 1
    cells: list[Markup] = []
    if shared and several:
        cells.append(tag("td", tag("small", "beside each run"), class_="number"))
    elif shared:
        cells.append(value_cell(befores[0] if befores else None, quantity))
        facts = [replace(fact, before=befores[0] if befores else None) for fact in facts]
    for fact in facts:
        cells += [] if shared else [value_cell(fact.before, quantity)]
        beside = shared and several and fact.before is not None and fact.after is not None
        was = f"from {shown_value(fact.before or 0.0, quantity)}" if beside else ""
        cells += [value_cell(fact.after, quantity, under=was), _change_cell(fact)]
    detail = tag("small", quantity.detail) if quantity.detail else None
    return tag("tr", tag("th", quantity.name, detail, scope="row"), *cells)


def _missing_row(name: str, command: str, *, wide: int) -> Markup:
    hint = tag("small", *prose(f"{command}, then `trisect report --measured F`"))
    return tag("tr", tag("th", name, scope="row"), tag("td", NOT_MEASURED, hint, colspan=wide))


def _change_cell(fact: Fact) -> Markup:
    change = change_of(fact)
    if change is None:
        return tag("td")
    error = tag("small", change.error) if change.error else None
    return tag("td", change.text, error, class_=f"number {change.css}")


@dataclass(frozen=True, kw_only=True)
class Change:
    """How a figure moved, in words, and whether that is for the better."""

    text: str
    better: bool | None
    """None where it may be chance."""
    error: str = ""

    @property
    def css(self) -> str:
        return {True: "better", False: "worse", None: "open"}[self.better]


def change_of(fact: Fact) -> Change | None:
    """Sizes by how much went, scores by their difference, the others by a factor."""
    if fact.before is None or fact.after is None or fact.before == 0:
        return None
    kind = fact.quantity.kind
    rises = kind in (TASK, SPEED)
    better = fact.after >= fact.before if rises else fact.after <= fact.before
    if kind == SIZE:
        return Change(text=f"{100 * (fact.after / fact.before - 1):+.1f}%", better=better)
    if kind == TASK:
        difference = fact.after - fact.before
        if fact.error is None:
            return Change(text=f"{difference:+.4f}", better=better)
        certain = abs(difference) > CERTAIN * fact.error
        found = better if certain else None
        return Change(text=f"{difference:+.4f}", better=found, error=f"+-{fact.error:.4f}")
    return Change(text=f"x{fact.after / fact.before:.3f}", better=better)
