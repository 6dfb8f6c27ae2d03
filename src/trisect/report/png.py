"""The same figures as PNG, drawn by matplotlib from the same numbers."""

import io
import warnings
from functools import singledispatch
from typing import Any

from trisect.report.drawing import LONGEST_TITLE, Bars, Chart, Figure, HeatMap, colour_of, cut, depth_colour
from trisect.report.heatmap import ink_on, shade
from trisect.report.numbers import short
from trisect.report.scale import Axis, axis_for

MARKERS = "osD^vP"
"""In the order of svg.SHAPES."""


def has_matplotlib() -> bool:
    """PNG is an extra: pip install 'trisect[plots]'."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def png(figure: Figure) -> bytes:
    """Draw a figure; the same numbers give the same bytes."""
    from matplotlib.figure import Figure as Canvas

    wide = max(7.0, 1.6 + 0.34 * figure.columns) if isinstance(figure, HeatMap) else 7.0
    tall = {HeatMap: 2.4, Bars: 1.6}.get(type(figure), 4.6)
    tall += 0.55 * len(figure.rows) if isinstance(figure, Bars) else 0.0
    canvas = Canvas(figsize=(wide, tall), dpi=120, layout="constrained")
    axes = canvas.subplots()
    # Names come from folders: without this, a dollar sign would start a formula.
    axes.set_title(cut(figure.title, LONGEST_TITLE), fontsize=10, parse_math=False)
    _draw(figure, axes)
    out = io.BytesIO()
    with warnings.catch_warnings():
        # A name in letters that the font does not have gets boxes; nobody can do anything about that here.
        warnings.filterwarnings("ignore", message="Glyph")
        canvas.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


@singledispatch
def _draw(figure: Figure, axes: Any) -> None:
    raise TypeError(f"no way to draw {type(figure).__name__}")


@_draw.register
def _chart(chart: Chart, axes: Any) -> None:
    number = 0
    for series in chart.series:
        layer = series.depth is not None
        axes.plot(
            [point.x for point in series.points],
            [point.y for point in series.points],
            color="0.4"
            if series.guide
            else depth_colour(series.depth or 0.0)
            if layer
            else colour_of(number),
            linestyle="--" if series.guide else "-" if series.line else "none",
            marker=("." if layer else MARKERS[number % len(MARKERS)]) if series.marks else "none",
            markevery=[place for place, point in enumerate(series.points) if point.tip],
            label=None if layer else _plain(series.label),
        )
        number += not layer
    points = [point for series in chart.series for point in series.points]
    _set_axis(axes.xaxis, axes.set_xlim, axes.set_xscale, axis_for((p.x for p in points), log=chart.log_x))
    _set_axis(axes.yaxis, axes.set_ylim, axes.set_yscale, axis_for((p.y for p in points), log=chart.log_y))
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(axis="y", alpha=0.4)
    if number:
        axes.legend(fontsize=7)


def _set_axis(axis: Any, limits: Any, kind: Any, wanted: Axis) -> None:
    from matplotlib.ticker import NullLocator

    kind("log" if wanted.log else "linear")
    limits(wanted.low, wanted.high)
    axis.set_ticks(wanted.ticks, [short(tick) for tick in wanted.ticks])
    axis.set_minor_locator(NullLocator())


@_draw.register
def _heat_map(heat: HeatMap, axes: Any) -> None:
    for row, cells in enumerate(heat.cells):
        for layer, cell in enumerate(cells):
            if cell is None:
                continue
            colour = shade(1 - heat.warmth(cell.value))
            channels = tuple(channel / 255 for channel in colour)
            axes.barh(row, 0.96, left=layer - 0.48, height=0.94, color=channels)
            axes.text(layer, row, cell.text, ha="center", va="center", fontsize=7, color=ink_on(colour))
    axes.set_yticks(range(len(heat.rows)), [_plain(row) for row in heat.rows])
    axes.set_ylim(len(heat.rows) - 0.5, -0.5)
    axes.set_xlim(-0.5, heat.columns - 0.5)
    axes.set_xlabel(f"layer (cells: {heat.unit}, %)")


@_draw.register
def _bars(bars: Bars, axes: Any) -> None:
    for row, (_, segments) in enumerate(bars.rows):
        left, total = 0.0, sum(segments.values())
        for number, name in enumerate(bars.names):
            value = 100 * segments.get(name, 0.0) / total
            axes.barh(
                row, value, left=left, color=colour_of(number), label=_plain(name) if row == 0 else None
            )
            left += value
    labels = [
        f"{_plain(label)}\n{short(sum(segments.values()))} {bars.unit}" for label, segments in bars.rows
    ]
    axes.set_yticks(range(len(bars.rows)), labels)
    axes.set_ylim(len(bars.rows) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.set_xlabel("share (%)")
    axes.figure.legend(fontsize=7, ncols=6, loc="outside lower center")


def _plain(text: str) -> str:
    """Text in which matplotlib sees no formula, and no name that it would leave out of a legend."""
    safe = cut(text).replace("$", r"\$")
    return f" {safe}" if safe.startswith("_") else safe
