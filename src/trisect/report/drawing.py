"""What a figure shows, before it is drawn: plain numbers and words, for SVG, PNG and tables alike."""

from dataclasses import dataclass, field

Table = tuple[tuple[str, ...], list[tuple[str | float, ...]]]
"""Header and rows."""

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7f7f7f",
    "#8c564b",
    "#a09000",
    "#5e4fa2",
)
"""Okabe and Ito's, which colour-blind people can tell apart, and three more."""
SHALLOW, DEEP = (168, 168, 168), (150, 70, 180)
"""The first and the last layer, where lines are layers."""

LONGEST_TITLE, LONGEST_LABEL = 76, 40
"""Letters that are drawn: folders may have any name."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One place in a chart, and what hovering over it says."""

    x: float
    y: float
    tip: str
    """What is shown when the pointer is on it; without any, it is a place on a line and has no mark."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points that belong together: one colour, one entry of the legend."""

    label: str
    points: tuple[Point, ...]
    line: bool = True
    marks: bool = True
    guide: bool = False
    """A line to compare with, that is nobody's data: dashed, in no colour."""
    depth: float | None = None
    """From 0 to 1 for a line that is one of many layers: its colour goes by depth, not by number."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What every picture has: a name for its file, a title, words below it."""

    name: str
    """Of its file."""
    title: str
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart(Figure):
    """Series over two axes."""

    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False

    def table(self) -> Table:
        rows: list[tuple[str | float, ...]] = [
            (series.label, point.x, point.y) for series in self.series for point in series.points
        ]
        return ("series", self.x_label, self.y_label), rows


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One field of a heat map."""

    value: float
    text: str
    tip: str


@dataclass(frozen=True, kw_only=True)
class HeatMap(Figure):
    """Rows of cells, one column per layer; the hotter the colour, the more is gone."""

    rows: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]
    unit: str
    coldest: float
    hottest: float

    @property
    def columns(self) -> int:
        return max(map(len, self.cells))

    def warmth(self, value: float) -> float:
        """0 cold, 1 hot."""
        span = self.hottest - self.coldest
        return 0.0 if span == 0 else min(1.0, max(0.0, (value - self.coldest) / span))

    def table(self) -> Table:
        rows: list[tuple[str | float, ...]] = [
            (layer, *("" if row[layer] is None else row[layer].value for row in self.cells))  # type: ignore[union-attr]
            for layer in range(self.columns)
        ]
        return ("layer", *(f"{row}, {self.unit}" for row in self.rows)), rows


@dataclass(frozen=True, kw_only=True)
class Bars(Figure):
    """One bar per row, made of segments: each is the whole of its row, whatever the others come to."""

    unit: str
    rows: tuple[tuple[str, dict[str, float]], ...]
    names: tuple[str, ...] = field(default=())
    """Of all segments, in the order of their colours."""

    def table(self) -> Table:
        rows: list[tuple[str | float, ...]] = [
            (label, name, segments[name])
            for label, segments in self.rows
            for name in self.names
            if name in segments
        ]
        return ("run", "stage", self.unit), rows


def cut(text: str, longest: int = LONGEST_LABEL) -> str:
    """Text that fits where it is drawn."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def colour_of(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def depth_colour(depth: float) -> str:
    """Between the first layer's colour and the last one's."""
    mixed = (round(a + depth * (b - a)) for a, b in zip(SHALLOW, DEEP, strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)
