"""What became of a model, as text or as a table in a notebook."""

from dataclasses import dataclass
from html import escape
from typing import Any

from trisect.plan.budget import PREFILL_LENGTH, Budget, Change, budget_of, compare
from trisect.records.shapes import ModelShape

Row = tuple[str, str, str, str]
HEADER: Row = ("", "before", "after", "removed")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Sizes before any compression and now."""

    before: Budget
    after: Budget
    method: str | None
    """None for a model that nothing was done to."""

    @property
    def change(self) -> Change:
        """The share of each cost that is gone."""
        return compare(self.before, self.after)

    def rows(self) -> list[Row]:
        """What is counted, before, after, and the share that is gone."""
        old, new, gone = self.before, self.after, self.change
        return [
            _row("decoder linear weights", old.linear_parameters, new.linear_parameters, gone.ratio),
            _row("whole model", old.parameters, new.parameters, gone.parameters),
            _row("KV bytes per token", old.kv_bytes_per_token, new.kv_bytes_per_token, gone.kv_bytes_per_token),
            _row(f"FLOPs of {PREFILL_LENGTH} tokens", old.flops, new.flops, gone.flops),
        ]

    def __str__(self) -> str:
        rows = [HEADER, *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        return "\n".join([f"method {self.method or 'none'}", *lines])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in HEADER)
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows())
        caption = f"<caption>method {escape(self.method or 'none')}</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def summarise(before: ModelShape, after: ModelShape, entry: dict[str, Any] | None) -> Summary:
    """From shapes, and what a compressed model's config says about it."""
    method = None if entry is None else str(entry["method"])
    return Summary(before=budget_of(before), after=budget_of(after), method=method)


def _row(name: str, old: int, new: int, removed: float) -> Row:
    return name, f"{old:,}", f"{new:,}", f"{removed:.1%}"
