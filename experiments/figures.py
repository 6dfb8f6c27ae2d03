"""Figures of the documents as SVG: the same receipts give the same bytes."""

import math
from collections.abc import Callable, Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

from trisect.support.plots import MARKERS, as_svg

STYLE = {"svg.hashsalt": "trisect", "svg.fonttype": "none", "font.size": 9.0, "axes.spines.right": False}
LOG_RANGE = 10.0
"""A figure whose largest value is this many times its smallest has a logarithmic axis."""

Points = Sequence[tuple[float, float]]


class Plot:
    """One pair of axes."""

    def __init__(self) -> None:
        with rc_context(STYLE):
            self.figure = Figure(figsize=(5.2, 3.6))
            # Fixed margins: computed ones depend on the fonts of the machine, and take longer than the figure.
            self.figure.subplots_adjust(left=0.13, right=0.97, bottom=0.13, top=0.92)
            self.axes = self.figure.subplots()
        self.axes.spines["top"].set_visible(False)

    def lines(self, lines: Mapping[str, Points], *, dense: float | None = None) -> None:
        """A line of points per name, and the dense model's value."""
        for at, (name, points) in enumerate(lines.items()):
            finite = sorted(point for point in points if math.isfinite(point[1]))
            if finite:
                self.axes.plot(*zip(*finite, strict=True), marker=MARKERS[at % len(MARKERS)], label=name)
        if dense is not None:
            self.axes.axhline(dense, color="0.5", linestyle="--", linewidth=1, label="dense")
        values = [value for points in lines.values() for _, value in points if math.isfinite(value)]
        self.log_if_wide([*values, *([] if dense is None else [dense])])

    def bars(self, values: Mapping[str, float], *, limits: Sequence[float] = ()) -> None:
        """A horizontal bar per name, the first on top, with a dash at its limit."""
        self.figure.subplots_adjust(left=0.32)
        made = self.axes.barh(range(len(values)), list(values.values()))
        self.axes.bar_label(made, fmt="%.2f", fontsize=7, padding=2)
        for at, limit in enumerate(limits):
            self.axes.vlines(limit, at - 0.4, at + 0.4, colors="black", linewidth=1.5)
        self.axes.set_yticks(range(len(values)), list(values))
        self.axes.invert_yaxis()
        self.axes.margins(x=0.1)

    def stacked(self, rows: Sequence[tuple[str, Mapping[str, float]]], stages: Sequence[str]) -> None:
        """A horizontal bar per row, made of its stages."""
        self.figure.subplots_adjust(left=0.28, top=0.86)
        ends = [0.0] * len(rows)
        for number, stage in enumerate(stages):
            widths = [float(seconds.get(stage, 0.0)) for _, seconds in rows]
            if any(widths):
                self.axes.barh(range(len(rows)), widths, left=ends, color=f"C{number % 10}", label=stage)
            ends = [end + width for end, width in zip(ends, widths, strict=True)]
        self.axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        self.axes.invert_yaxis()

    def log_if_wide(self, values: Sequence[float]) -> None:
        """A logarithmic axis where the values ask for it and allow it."""
        if min(values) > 0 and max(values) / min(values) > LOG_RANGE:
            self.axes.set_yscale("log")

    def label(self, title: str, x: str, y: str, *, legend: bool = True) -> None:
        """Title, axes and legend."""
        self.axes.set_title(title)
        self.axes.set_xlabel(x)
        self.axes.set_ylabel(y)
        if legend:
            self.axes.legend(frameon=False)


def drawn(draw: Callable[[Plot], None]) -> str:
    """A figure as the text of an SVG file."""
    plot = Plot()
    draw(plot)
    return as_svg(plot.figure, style=STYLE).decode()
