"""A compression in the terminal: what went, what it cost, what each layer keeps; numbers for people."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

from trisect.bench.rows import span
from trisect.bundle import weights_size
from trisect.evaluate.perplexity import Perplexity
from trisect.models import zeros_of
from trisect.pipeline.job import Result
from trisect.plan.budget import PREFILL_LENGTH, Budget, Change, budget_of, compare, matrix_parameters
from trisect.records.shapes import COMPONENTS, LayerShape, ModelShape, paired
from trisect.support.plots import heat_colours

LAYERS_PER_ROW = 24  # fits a line of 120 characters
WORTH_MORE = 0.05  # share of the perplexity that more text could take away, below which nothing is said
UNREMARKABLE = ("full width", "folded")  # notes that are kept in the receipt, but not printed layer by layer


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Sizes before any compression and now; prints as a table."""

    before: Budget
    after: Budget
    method: str | None  # None for a model that nothing was done to

    @property
    def change(self) -> Change:
        """The share of each cost that is gone."""
        return compare(self.before, self.after)

    def __str__(self) -> str:
        columns = (Column(name, justify="right") for name in ("before", "after", "removed"))
        table = Table("", *columns, title=f"method {self.method or 'none'}", title_justify="left")
        add_sizes(table, self.before, self.after)
        with StringIO() as out:
            Console(file=out, width=100).print(table)
            return out.getvalue().rstrip()

    __repr__ = __str__


def add_sizes(table: Table, old: Budget, new: Budget) -> None:
    """The whole model's rows: what is counted, before, after, and the share that is gone."""
    change = compare(old, new)
    linear = count(old.linear_parameters), count(new.linear_parameters)
    cache = f"{old.kv_bytes_per_token:,}", f"{new.kv_bytes_per_token:,}"
    flops = f"{old.flops:.3g}", f"{new.flops:.3g}"
    table.add_row("decoder linear weights", *linear, f"{change.ratio:.1%}")
    table.add_row("whole model", count(old.parameters), count(new.parameters), f"{change.parameters:.1%}")
    table.add_row("KV cache bytes per token", *cache, f"{change.kv_bytes_per_token:.1%}")
    table.add_row(f"FLOPs of {PREFILL_LENGTH} tokens", *flops, f"{change.flops:.1%}")


def compression_table(
    before: ModelShape,
    after: ModelShape,
    *,
    files: tuple[int, int] | None = None,
    perplexities: Sequence[tuple[Perplexity, Perplexity]] = (),
    labels: tuple[str, str] = ("before", "after"),
) -> Table:
    """Components first, then the model. Bytes of its weight `files` and `perplexities` add what they know."""
    old, new = budget_of(before), budget_of(after)
    change = compare(old, new)
    table = Table("", *(Column(name, justify="right") for name in (*labels, "removed")), "width")
    for component in COMPONENTS:
        sizes = count(old.components[component]), count(new.components[component])
        removed = f"{change.components[component]:.1%}"
        width = width_change(before, after, component=component)
        table.add_row(f"{component.upper()} parameters", *sizes, removed, width)
    mixtures = [(o, n) for o, n in paired(before, after) if o.experts]
    if mixtures:
        were, are = ([pair[n].experts for pair in mixtures] for n in (0, 1))
        met = f"{span(o.top_k for o, _ in mixtures)} per token"
        met += " and the shared one" if any(o.shared for o, _ in mixtures) else ""
        table.add_row("experts of a layer", span(were), span(are), f"{1 - sum(are) / sum(were):.1%}", met)
    table.add_section()
    had, have = len(before.layers), len(after.layers)
    if had != have:
        table.add_row("decoder layers", f"{had}", f"{have}", f"{1 - have / had:.1%}")
    add_sizes(table, old, new)
    if files is not None:
        held = (decimal(size, precision=2) for size in files)
        table.add_row("weight files", *held, f"{1 - files[1] / files[0]:.1%}")
    table.add_section()
    for was, now in perplexities:
        label = f"perplexity, {Path(now.data).name} ({now.windows} x {now.length})"
        rise = f"x{now.perplexity / was.perplexity:.3f}"
        table.add_row(label, f"{was.perplexity:.3f}", f"{now.perplexity:.3f}", rise)
    return table


def more_samples(receipt: dict[str, Any]) -> str | None:
    """A line about what more calibration text could gain: by how much held-out text rose more than fitted text."""
    rises = [_rise(row) for row in receipt.get("perplexities", ()) if row["after"]["data"].startswith("held-out ")]
    if "fitted" not in receipt or not rises:
        return None
    held, fitted = sum(rises) / len(rises), _rise(receipt["fitted"])
    gain = 1 - math.exp(min(0.0, fitted - held))
    if gain < WORTH_MORE:
        return None
    samples = receipt["recipe"]["calibration"]["samples"]
    found = f"perplexity rose x{math.exp(held):.2f} on held-out text, x{math.exp(fitted):.2f} on windows calibrated on"
    more = f"More could lower it by up to {gain:.0%}: try --samples {4 * samples} (now {samples})"
    return f"Few samples: {found}. {more}."


def _rise(row: dict[str, Any]) -> float:
    return float(row["after"]["nll"] - row["before"]["nll"])


def result_lines(result: Result) -> Iterator[str | Table]:
    """The final table, the trials under a bound, and the solver's notes."""
    known, out = result.receipt.get("source_bytes"), result.receipt.get("out")
    files = None if known is None or out is None else (known, weights_size(Path(out)))
    rows = [*result.perplexities, *([] if result.fitted is None else [result.fitted])]
    yield compression_table(result.before, result.after, files=files, perplexities=rows)
    if more := more_samples(result.receipt):
        yield more
    if result.plan.masked:
        zeros = zeros_of(result.model) / budget_of(result.before).linear_parameters
        yield f"{zeros:.1%} of the decoder's linear weights are zero now; no shape has changed."
    if target := result.receipt.get("target"):
        windows, bound = target["held_out"]["windows"], target["max_ppl_increase"]
        yield f"Perplexity on {windows} held-out calibration windows may rise by {bound}:"
        for trial in target["trials"]:
            verdict = "inside" if trial["inside"] else "outside"
            yield f"  {trial['ratio']:.1%} removed: x{math.exp(trial['rise']):.4f}, {verdict}"
    for entry in result.losses:
        if entry["note"] and not entry["note"].startswith(UNREMARKABLE):
            yield f"layer {entry['layer']} {entry['component']}: {entry['note']}"


def width_change(before: ModelShape, after: ModelShape, *, component: str) -> str:
    """E.g. "head 64 -> 48", or "head 64 -> 32..48" where the layers differ; experts apart from MLPs."""
    pairs = [(o, n) for o, n in paired(before, after) if component in o.components]
    changes = []
    for name in ("inner", "expert") if component == "mlp" else ("head",):
        layers = [(o, n) for o, n in pairs if name == "head" or bool(o.experts) == (name == "expert")]
        was, now = (span(pair[n].width(component) for pair in layers) for n in (0, 1))
        if layers:
            changes.append(f"{name} {was}" + (f" -> {now}" if now != was else ""))
    return ", ".join(changes)


def kept_shares(before: ModelShape, after: ModelShape) -> dict[str, list[float]]:
    """Component -> share kept, layer by layer: of its width, or of its parameters where maps are factored."""
    return {part: [_kept(old, new, part) for old, new in paired(before, after)] for part in COMPONENTS}


def _kept(old: LayerShape, new: LayerShape, component: str) -> float:
    if component not in old.components:
        return 1.0
    if new.linears or new.dropped_experts:
        return matrix_parameters(new, component) / matrix_parameters(old, component)
    return new.width(component) / old.width(component)


def heat_tables(before: ModelShape, after: ModelShape) -> Iterator[Table]:
    """The plan as a heat map in per cent, a few layers to a table; colours where the terminal has any."""
    shares = kept_shares(before, after)
    for start in range(0, len(after.layers), LAYERS_PER_ROW):
        layers = range(start, min(start + LAYERS_PER_ROW, len(after.layers)))
        columns = (Column(str(layer), justify="right", min_width=3) for layer in layers)
        table = Table("% kept", *columns, box=None, padding=(0, 1, 0, 0), show_edge=False)
        for component in COMPONENTS:
            kept = [shares[component][layer] for layer in layers]
            styles = [Style(bgcolor=colour, color=ink) for colour, ink in map(heat_colours, kept)]
            texts = (Text(f"{100 * share:.0f}", style=style) for share, style in zip(kept, styles, strict=True))
            table.add_row(component.upper(), *texts)
        yield table


def count(number: float) -> str:
    """E.g. 135.00M."""
    size, unit = next(((size, unit) for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if number >= size), (1, ""))
    return f"{number / size:.2f}{unit}" if unit else f"{number:g}"


def short(number: float) -> str:
    """Four digits that mean something, no exponent where none is needed."""
    if number == 0 or 1e-3 <= abs(number) < 1e6:
        return f"{number:.4g}" if abs(number) < 1e4 else f"{number:,.0f}"
    return f"{number:.3g}"
