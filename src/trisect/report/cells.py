"""Cells and tables of the page."""

from collections.abc import Iterable, Sequence

from trisect.report.markup import Markup, tag
from trisect.report.numbers import byte_count, count, short
from trisect.report.records import PERPLEXITY, TASK, Quantity

NOT_MEASURED = tag("span", "not measured", class_="none")


def prose(text: str) -> list[Markup | str]:
    """Text in which every second piece between backticks is code."""
    return [tag("code", piece) if at % 2 else piece for at, piece in enumerate(text.split("`"))]


def value_cell(value: float | None, quantity: Quantity, *, under: str = "") -> Markup:
    """A number, with small text under it where there is any."""
    if value is None:
        return tag("td", NOT_MEASURED)
    small = tag("small", under) if under else None
    return tag("td", shown_value(value, quantity), small, class_="number", data_value=repr(value))


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


def plain_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """Any table; numbers are shown short and sorted by their full value."""
    body = [tag("tr", *(_plain_cell(entry) for entry in row)) for row in rows]
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in header)))
    return scrolling(tag("table", head, tag("tbody", *body), class_="sortable"))


def _plain_cell(entry: object) -> Markup:
    return sortable(entry, short(entry)) if isinstance(entry, int | float) else tag("td", entry)


def sortable(value: float, text: str) -> Markup:
    return tag("td", text, class_="number", data_value=repr(value))


def scrolling(table: Markup) -> Markup:
    """Wide tables scroll by themselves, by keyboard too."""
    return tag("div", table, class_="scroll", tabindex="0")
