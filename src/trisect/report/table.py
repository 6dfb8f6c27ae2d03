"""The table at the end of a compression: what went, what it cost, what is left."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from trisect.plan.budget import PREFILL_LENGTH, budget_of, compare
from trisect.records.parts import COMPONENTS
from trisect.records.shapes import ModelShape
from trisect.report.numbers import count, percent

if TYPE_CHECKING:
    from trisect.evaluate.perplexity import Perplexity

WIDTH_NAMES = {"qk": "head", "ov": "head", "mlp": "inner"}


def compression_table(
    before: ModelShape,
    after: ModelShape,
    *,
    losses: Sequence[Mapping[str, Any]] = (),
    perplexities: "Sequence[tuple[Perplexity, Perplexity]]" = (),
    labels: tuple[str, str] = ("before", "after"),
) -> Table:
    """Components first, then the model. `losses` and `perplexities` add what they know."""
    shares = lost_shares(losses)
    table = Table("", *(Column(name, justify="right") for name in (*labels, "removed")), "width")
    if shares:
        table.add_column("objective lost", justify="right")
    _add_components(table, before, after, shares=shares)
    table.add_section()
    _add_model(table, before, after)
    table.add_section()
    for was, now in perplexities:
        label = f"perplexity, {Path(now.data).name} ({now.windows} x {now.length})"
        rise = f"x{now.perplexity / was.perplexity:.3f}"
        table.add_row(label, f"{was.perplexity:.3f}", f"{now.perplexity:.3f}", rise)
    return table


def _add_components(
    table: Table, before: ModelShape, after: ModelShape, *, shares: Mapping[str, float]
) -> None:
    old, new = budget_of(before), budget_of(after)
    change = compare(old, new)
    for component in COMPONENTS:
        row = [
            f"{component.upper()} parameters",
            count(old.components[component]),
            count(new.components[component]),
            percent(change.components[component]),
            width_change(before, after, component=component),
        ]
        if component in shares:
            row.append(percent(shares[component], digits=2))
        table.add_row(*row)


def _add_model(table: Table, before: ModelShape, after: ModelShape) -> None:
    old, new = budget_of(before), budget_of(after)
    change = compare(old, new)
    linear = count(old.linear_parameters), count(new.linear_parameters)
    whole = count(old.parameters), count(new.parameters)
    cache = f"{old.kv_bytes_per_token:,}", f"{new.kv_bytes_per_token:,}"
    flops = f"{old.flops:.3g}", f"{new.flops:.3g}"
    table.add_row("decoder linear weights", *linear, percent(change.ratio))
    table.add_row("whole model", *whole, percent(change.parameters))
    table.add_row("KV cache bytes per token", *cache, percent(change.kv_bytes_per_token))
    table.add_row(f"FLOPs of {PREFILL_LENGTH} tokens", *flops, percent(change.flops))


def lost_shares(losses: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Component -> share of its objective lost, the mean over the layers that were narrowed."""
    shares: dict[str, list[float]] = {}
    for entry in losses:
        # An untouched part has nothing at stake: its total is 0.
        if entry["total"] > 0:
            shares.setdefault(entry["component"], []).append(entry["loss"] / entry["total"])
    return {component: sum(values) / len(values) for component, values in shares.items()}


def width_change(before: ModelShape, after: ModelShape, *, component: str) -> str:
    """E.g. "head 64 -> 48", or "head 64 -> 32..48" where the layers differ."""
    was = _span(layer.width(component) for layer in before.layers)
    now = _span(layer.width(component) for layer in after.layers)
    return f"{WIDTH_NAMES[component]} {was}" + (f" -> {now}" if now != was else "")


def _span(widths: Iterable[int]) -> str:
    found = sorted(set(widths))
    return str(found[0]) if len(found) == 1 else f"{found[0]}..{found[-1]}"
