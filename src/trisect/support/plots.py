"""Figures: plain numbers and words first, then drawn by matplotlib as SVG.

The same figure gives the same bytes: no dates, no random ids, text left as text. matplotlib is the extra
`plots`; the records and their tables need nothing.
"""

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any
from xml.sax.saxutils import quoteattr

INK, SOFT, FAINT, PAPER = "#1c2128", "#57606a", "#d8dde3", "#ffffff"
COLOURS = "#0072b2 #d55e00 #009e73 #cc79a7 #e69f00 #56b4e9 #7f7f7f #8c564b #a09000 #5e4fa2".split()
"""Okabe and Ito's, which colour-blind people can tell apart, and three more."""
MARKERS = "osD^vP*X<>h"
COLD, HOT = (232, 240, 248), (178, 24, 43)  # untouched, and cut to nothing
VARIABLES = {INK: "ink", SOFT: "soft", FAINT: "faint"}
VARIABLES |= {colour: f"c{number}" for number, colour in enumerate(COLOURS)}
"""Colour -> the CSS variable that a page sets in its place."""
STYLE: Any = {
    **{"svg.hashsalt": "trisect", "svg.fonttype": "none", "font.size": 9.0},
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **{"axes.edgecolor": SOFT, "axes.facecolor": "none", "figure.facecolor": PAPER, "grid.color": FAINT},
    **{"axes.spines.right": False, "axes.spines.top": False, "font.sans-serif": ["DejaVu Sans", "sans-serif"]},
    "text.parse_math": False,  # names may hold anything
}

UNWRITABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""What neither XML nor UTF-8 can hold, and what a terminal would obey."""
LONGEST_TITLE, LONGEST_LABEL = 76, 40  # letters that are drawn: folders may have any name
LINE_OF_LEGEND = 90  # letters that fit beside each other above a plot
LOG_RANGE = 20.0  # an axis whose largest value is so many times its smallest is logarithmic where it may be
MOST_MARKS, MOST_MARKED = 16, 100  # marks of one line, and points of a line that has any
WIDTH = 5.8  # inches

Point = tuple[float, float]
Row = tuple[str | float, ...]
Table = tuple[tuple[str, ...], list[Row]]
Legend = list[tuple[str, Any]]  # label and artist of every entry


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points that belong together: one colour, one entry of the legend."""

    label: str
    points: Sequence[Point]
    line: bool = True
    guide: bool = False  # a line to compare with, not data: dashed, without marks


@dataclass(frozen=True, kw_only=True)
class Words:
    """What every figure has: a name for its file, a title, words below it."""

    name: str
    title: str
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart(Words):
    """Series over two axes."""

    size = WIDTH, 2.8  # width of the whole, and height of the plot itself
    axes: tuple[str, str]  # what lies across, and what upwards
    series: Sequence[Series]
    log_y: bool = False  # logarithmic where the values need it

    def table(self) -> Table:
        """A row per point."""
        rows: list[Row] = [(series.label, *point) for series in self.series for point in series.points]
        return ("series", *self.axes), rows

    def draw(self, axes: Any) -> Legend:
        legend: Legend = []
        for number, series in enumerate(self.series):
            every = max(1, math.ceil(len(series.points) / MOST_MARKS))
            style: Any = {"color": COLOURS[number % len(COLOURS)], "linewidth": 1.4, "markevery": every}
            if series.guide:
                style = {"color": SOFT, "linewidth": 1, "linestyle": "--"}
            elif len(series.points) <= MOST_MARKED:
                style |= {"marker": MARKERS[number % len(MARKERS)], "markersize": 5}
            style |= {} if series.line else {"linestyle": "none"}
            legend.append((series.label, axes.plot(*zip(*series.points, strict=True), clip_on=False, **style)[0]))
        values = [y for series in self.series for _, y in series.points]
        _set_scales(axes, values, self.axes, log=self.log_y)
        return legend


@dataclass(frozen=True, kw_only=True)
class HeatMap(Words):
    """Rows of shares, one column per layer; the hotter the colour, the more is gone."""

    rows: Mapping[str, Sequence[float | None]]
    unit: str
    coldest: float
    hottest: float
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What else there is to say of each cell, in the table."""

    @property
    def columns(self) -> int:
        return max(map(len, self.rows.values()))

    @property
    def size(self) -> tuple[float, float]:
        return max(WIDTH, 1.0 + 0.32 * self.columns), 0.3 * len(self.rows)

    def cells(self) -> list[tuple[int, str, float]]:
        """Layer, row and value of each that has one."""
        rows = self.rows.items()
        return [(n, label, value) for label, values in rows for n, value in enumerate(values) if value is not None]

    def table(self) -> Table:
        notes: Any = {label: dict(enumerate(said)) for label, said in self.notes.items()}
        rows: list[Row] = [(*cell, notes.get(cell[1], {}).get(cell[0], "")) for cell in self.cells()]
        return ("layer", "part", self.unit, "note"), rows

    def draw(self, axes: Any) -> Legend:
        names, span = list(self.rows), self.hottest - self.coldest
        for layer, label, value in self.cells():
            colour, ink = heat_colours(1 - ((value - self.coldest) / span if span else 0.0))
            axes.barh(names.index(label), 0.96, left=layer - 0.48, height=0.94, color=colour)
            centre = {"ha": "center", "va": "center", "fontsize": 7, "color": ink}
            axes.text(layer, names.index(label), f"{100 * value:.0f}", **centre)
        axes.set_yticks(range(len(names)), [_label(name, longest=9) for name in names])
        axes.set_ylim(len(names) - 0.5, -0.6)
        axes.tick_params(left=False)
        axes.spines["left"].set_visible(False)
        axes.set_xlim(-0.5, self.columns - 0.5)
        axes.set_xticks(range(self.columns))
        axes.set_xlabel(f"layer (cells: {self.unit}, %)")
        return []


Figure = Chart | HeatMap  # its numbers are a `table`, and `draw` puts them on axes and gives what a legend names


def has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


def svg(figure: Figure, *, themed: bool = False) -> str:
    """A figure as an SVG element; `themed` takes a page's colours."""
    canvas = _draw(figure)
    canvas.patch.set_visible(not themed)
    text = as_svg(canvas).decode("utf-8")
    # Names of groups are dropped, as several figures share a page; so are metadata, and a style for all elements.
    text = re.sub(r"<(metadata|style)\b.*?</\1>\n?", "", text[text.index("<svg") :].rstrip(), flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    if themed:
        text = re.sub("|".join(VARIABLES), lambda found: f"var(--{VARIABLES[found[0]]})", text)
    label = UNWRITABLE.sub("\ufffd", f"{figure.title}. {figure.caption}")
    return text.replace("<svg ", f'<svg role="img" stroke-linejoin="round" aria-label={quoteattr(label)} ', 1)


def file_name(text: str) -> str:
    """The name of an SVG file from words that may hold anything."""
    return re.sub(r"[^a-z0-9.+]+", "-", text.lower()).strip("-") + ".svg"


def as_svg(figure: Any, *, style: Any = STYLE) -> bytes:
    """A matplotlib figure as a file."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    out = io.BytesIO()
    with rc_context(style), warnings.catch_warnings():
        # A name in letters that the font does not have gets boxes.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": "trisect"})
    # matplotlib ends some lines in blanks, which editors and hooks like to take off.
    return re.sub(rb"[ \t]+$", b"", out.getvalue(), flags=re.MULTILINE)


def heat_colours(share: float) -> tuple[str, str]:
    """The colour of a share that is kept, and the ink that can be read on it."""
    kept = min(1.0, max(0.0, share))
    colour = bytes(round(hot + kept * (cold - hot)) for hot, cold in zip(HOT, COLD, strict=True))
    return f"#{colour.hex()}", "white" if sum(colour) < 380 else "black"


def _draw(figure: Figure) -> Any:
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    with rc_context(STYLE):
        canvas = Canvas()
        legend = figure.draw(canvas.subplots())
        width, inner = figure.size
        labels = [_label(label) for label, _ in legend]
        columns = max(1, LINE_OF_LEGEND // (6 + max(map(len, labels), default=0)))
        top, bottom = 0.38 + 0.19 * math.ceil(len(labels) / columns), 0.55
        height = top + inner + bottom
        canvas.set_size_inches(width, height)
        # Fixed margins: computed ones depend on the fonts of the machine, and take longer than the figure.
        canvas.subplots_adjust(0.75 / width, bottom / height, 1 - 0.15 / width, 1 - top / height)
        canvas.text(0.15 / width, 1 - 0.1 / height, _cut(figure.title, LONGEST_TITLE), va="top", weight="bold")
        if legend:
            place: Any = {"loc": "upper left", "bbox_to_anchor": (0.1 / width, 1 - 0.3 / height)}
            style: Any = {"ncols": columns, "frameon": False, "fontsize": 8, "borderaxespad": 0}
            canvas.legend([artist for _, artist in legend], labels, **place, **style)
    return canvas


def _set_scales(axes: Any, values: Sequence[float], labels: tuple[str, str], *, log: bool) -> None:
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    if log and min(values) > 0 and max(values) / min(values) > LOG_RANGE:
        axes.set_yscale("log")
        few = max(values) / min(values) < 1e3
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
        axes.yaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:.6g}"))
    axes.set_xlabel(_cut(labels[0], LONGEST_TITLE))
    axes.set_ylabel(_cut(labels[1], LONGEST_TITLE))
    axes.grid(axis="y")
    axes.set_axisbelow(True)


def _label(text: str, *, longest: int = LONGEST_LABEL) -> str:
    """A short label; matplotlib would leave one that begins with an underscore out of a legend."""
    cut = _cut(text, longest)
    return f" {cut}" if cut.startswith("_") else cut


def _cut(text: str, longest: int) -> str:
    text = UNWRITABLE.sub("\ufffd", text)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
