"""Figures as SVG: perplexity against ratio, bars per component, local objectives against perplexity.

The same receipts give the same bytes: no dates, no random ids, text left as text.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from trisect.compare.markdown import Diagnostic, diagnostics
from trisect.compare.outcomes import ModelOutcome, Row
from trisect.compare.recipe import Drawing, Recipe
from trisect.support.plots import MARKERS, as_svg, colour_legend, file_name, need_matplotlib, one_plot

LOG_RANGE = 10.0
"""A figure whose largest value is this many times its smallest has a logarithmic axis."""


def draw(recipe: Recipe, models: Sequence[ModelOutcome]) -> dict[str, bytes]:
    """File name -> SVG, for every figure of the recipe that has something to show."""
    if not recipe.figures:
        return {}
    need_matplotlib()
    made: dict[str, bytes] = {}
    for drawing in recipe.figures:
        if drawing.kind == "diagnostic":
            for entry in diagnostics(models, drawing):
                made[file_name("diagnostic", entry.model, entry.method, entry.text)] = _diagnostic(entry)
            continue
        kind = _ratio if drawing.kind == "ratio" else _bars
        for model in models:
            for number in _numbers(model, drawing):
                text = model.model.evaluations[number].name
                figure = kind(model, number, drawing)
                if figure is not None:
                    made[file_name(drawing.kind, model.model.name, text)] = figure
    return made


def _numbers(model: ModelOutcome, drawing: Drawing) -> Iterable[int]:
    """Which evaluations a drawing is about: the named one, or all."""
    if drawing.evaluation is None:
        return range(len(model.model.evaluations))
    number = model.text_number(drawing.evaluation)
    return [] if number is None else [number]


def _ratio(model: ModelOutcome, number: int, drawing: Drawing) -> bytes | None:
    """Perplexity against the ratio really removed, one line per method."""
    lines = {model.label(row): _points(row, number) for row in model.rows}
    lines = {label: points for label, points in lines.items() if points}
    dense = model.dense.perplexity(number)
    if not lines:
        return None
    figure, axes = one_plot()
    for at, (label, points) in enumerate(lines.items()):
        x, y = zip(*points, strict=True)
        axes.plot(x, y, marker=MARKERS[at % len(MARKERS)], label=label)
    if dense is not None:
        axes.axhline(dense, color="0.5", linestyle="--", linewidth=1, label="dense")
    values = [y for points in lines.values() for _, y in points]
    _scale(axes, [*values, *([] if dense is None else [dense])])
    axes.set_xlabel("removed (%)")
    axes.set_ylabel(f"perplexity, {model.model.evaluations[number].name}")
    axes.set_title(model.model.name)
    axes.legend(frameon=False)
    return as_svg(figure)


def _points(row: Row, number: int) -> list[tuple[float, float]]:
    points = []
    for outcome in row.cells.values():
        removed, value = outcome.removed(), outcome.perplexity(number)
        if removed is not None and value is not None and math.isfinite(value):
            points.append((100 * removed, value))
    return sorted(points)


def _bars(model: ModelOutcome, number: int, drawing: Drawing) -> bytes | None:
    """Increase in perplexity at one ratio, bars grouped by the components that were cut."""
    ratio = drawing.ratio if drawing.ratio is not None else min(model.ratios)
    groups: dict[str, list[tuple[str, float]]] = {}
    for row in model.rows:
        outcome = row.cells.get(ratio)
        increase = None if outcome is None else model.increase(outcome, number)
        if increase is not None and math.isfinite(increase):
            group = "+".join(part.upper() for part in row.parts)
            groups.setdefault(group, []).append((_short(model, row), increase))
    if not groups:
        return None
    figure, axes = one_plot()
    labels = list(dict.fromkeys(label for bars in groups.values() for label, _ in bars))
    at = 0.0
    ticks = []
    for group, bars in groups.items():
        for offset, (label, value) in enumerate(bars):
            bar = axes.bar(at + offset, value, color=f"C{labels.index(label) % 10}", width=0.9)
            axes.bar_label(bar, fmt="%.2f", fontsize=7)
        ticks.append((at + (len(bars) - 1) / 2, group))
        at += len(bars) + 1
    _scale(axes, [value for bars in groups.values() for _, value in bars])
    axes.set_xticks([place for place, _ in ticks], [group for _, group in ticks])
    axes.set_ylabel(f"increase in perplexity, {model.model.evaluations[number].name}")
    axes.set_title(f"{model.model.name}, {100 * ratio:g}% removed")
    colour_legend(axes, {label: f"C{number % 10}" for number, label in enumerate(labels)})
    return as_svg(figure)


def _short(model: ModelOutcome, row: Row) -> str:
    """A row's label without the parts, which the group already names."""
    return re.sub(rf" {','.join(row.parts)}\b", "", model.label(row))


def _diagnostic(entry: Diagnostic) -> bytes:
    """Share of the local objective lost against the increase in perplexity, one line per component."""
    figure, axes = one_plot()
    for at, part in enumerate(entry.alone):
        both = [ratio for ratio in entry.ratios if ratio in entry.lost[part] and ratio in entry.alone[part]]
        x = [100 * entry.lost[part][ratio] for ratio in both]
        y = [entry.alone[part][ratio] for ratio in both]
        axes.plot(x, y, marker=MARKERS[at], label=f"{part.upper()} alone")
        for ratio, *point in zip(both, x, y, strict=True):
            axes.annotate(f"{100 * ratio:g}%", point, textcoords="offset points", xytext=(4, 3), fontsize=7)
    axes.set_xlabel("local objective lost (%)")
    axes.set_ylabel(f"increase in perplexity, {entry.text}")
    axes.set_title(f"{entry.model}, {entry.method}")
    axes.legend(frameon=False)
    return as_svg(figure)


def _scale(axes: Any, values: Sequence[float]) -> None:
    """Logarithmic where the values ask for it and allow it."""
    if min(values) > 0 and max(values) / min(values) > LOG_RANGE:
        axes.set_yscale("log")
