"""The figures of a recipe: perplexity against ratio, bars per component, local objectives against perplexity."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from trisect.compare.markdown import Diagnostic, diagnostics
from trisect.compare.outcomes import ModelOutcome, Row
from trisect.compare.recipe import Drawing, Recipe
from trisect.support.plots import Bar, Chart, Figure, Groups, Point, Series, drawn


def draw(recipe: Recipe, models: Sequence[ModelOutcome]) -> dict[str, bytes]:
    """File name -> SVG, for every figure of the recipe that has something to show."""
    figures = [figure for drawing in recipe.figures for figure in _figures(drawing, models)]
    return drawn(figure for figure in figures if figure is not None)


def _figures(drawing: Drawing, models: Sequence[ModelOutcome]) -> Iterator[Figure | None]:
    if drawing.kind == "diagnostic":
        yield from map(_diagnostic, diagnostics(models, drawing))
        return
    for model in models:
        for number, text in enumerate(model.model.evaluations):
            if drawing.evaluation in (None, text.name):
                yield _ratio(model, number) if drawing.kind == "ratio" else _bars(model, number, drawing.ratio)


def _ratio(model: ModelOutcome, number: int) -> Chart | None:
    """Perplexity against the ratio really removed, one line per method."""
    lines = {model.label(row): _points(row, number) for row in model.rows}
    series = [Series(label=label, points=points) for label, points in lines.items() if points]
    if not series:
        return None
    dense, removed = model.dense.perplexity(number), [x for each in series for x, _ in each.points]
    if dense is not None and math.isfinite(dense):
        ends = [(min(removed), dense), (max(removed), dense)]
        series.append(Series(label="dense", guide=True, points=ends))
    name, text = model.model.name, model.model.evaluations[number].name
    labels: Any = {"x_label": "removed (%)", "y_label": f"perplexity, {text}"}
    return Chart(name=f"ratio-{name}-{text}", title=name, series=series, log_y=True, **labels)


def _points(row: Row, number: int) -> list[Point]:
    known = ((outcome.removed(), outcome.perplexity(number)) for outcome in row.cells.values())
    return sorted((100 * x, y) for x, y in known if x is not None and y is not None and math.isfinite(y))


def _bars(model: ModelOutcome, number: int, asked: float | None) -> Groups | None:
    """Increase in perplexity at one ratio, bars grouped by the components that were cut."""
    ratio = min(model.ratios) if asked is None else asked
    groups: dict[str, list[Bar]] = {}
    for row in model.rows:
        increase = model.increase(row.cells[ratio], number) if ratio in row.cells else None
        if increase is not None and math.isfinite(increase):
            # The group names the parts.
            label = re.sub(rf" {','.join(row.parts)}\b", "", model.label(row))
            bar = Bar(label=label, value=increase, note=f"{increase:.2f}")
            groups.setdefault("+".join(row.parts).upper(), []).append(bar)
    name, text = model.model.name, model.model.evaluations[number].name
    title, label = f"{name}, {100 * ratio:g}% removed", f"increase in perplexity, {text}"
    return Groups(name=f"bars-{name}-{text}", title=title, y_label=label, groups=groups) if groups else None


def _diagnostic(entry: Diagnostic) -> Chart | None:
    """Share of the local objective lost against the increase in perplexity, one line per component."""
    series = []
    for part, alone in entry.alone.items():
        ratios = [ratio for ratio in entry.ratios if ratio in alone and ratio in entry.lost[part]]
        points = [(100 * entry.lost[part][ratio], alone[ratio]) for ratio in ratios]
        notes = [f"{100 * ratio:g}%" for ratio in ratios]
        if points:
            series.append(Series(label=f"{part.upper()} alone", points=points, notes=notes))
    name, title = f"diagnostic-{entry.model}-{entry.method}-{entry.text}", f"{entry.model}, {entry.method}"
    labels: Any = {"x_label": "local objective lost (%)", "y_label": f"increase in perplexity, {entry.text}"}
    return Chart(name=name, title=title, series=series, **labels) if series else None
