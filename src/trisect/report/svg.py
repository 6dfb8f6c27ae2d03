"""Figures as SVG text: whole by themselves, and taking on a page's colours by their classes."""

from collections.abc import Sequence
from functools import singledispatch

from trisect.report.drawing import (
    LONGEST_TITLE,
    Bars,
    Chart,
    Figure,
    HeatMap,
    Series,
    colour_of,
    cut,
    depth_colour,
)
from trisect.report.heatmap import ink_on, shade
from trisect.report.markup import Markup, join, tag
from trisect.report.numbers import percent, short
from trisect.report.scale import Axis, axis_for

WIDTH, HEIGHT = 560, 360
LEFT, RIGHT, TOP, BOTTOM = 66, 18, 34, 48
INK, FAINT, PAPER = "#1c2128", "#d8dde3", "#ffffff"
SMALLEST_CELL = 28
"""Of a heat map: room for a number."""
GAP = 10
"""Between legend and plot."""
LINE, LETTER = 18, 7.0
"""Height of a line of small text, and the width of one letter: fonts differ, so this is a guess with room."""
SHAPES = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "M-3.6,-3.6h7.2v7.2h-7.2z",
    "M0,-5L5,0L0,5L-5,0z",
    "M0,-4.8L4.6,3.6h-9.2z",
    "M0,4.8L4.6,-3.6h-9.2z",
    "M-1.6,-5h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4v-3.2h3.4z",
)
"""Circle, square, diamond, triangles, cross: told apart in black and white too."""
GUIDE = {"fill": "none", "stroke": "#57606a", "stroke_dasharray": "4 3", "class_": "guide"}


@singledispatch
def svg(figure: Figure) -> Markup:
    """Draw a figure."""
    raise TypeError(f"no way to draw {type(figure).__name__}")


@svg.register
def _chart(chart: Chart) -> Markup:
    named, layers = _split(chart)
    points = [point for series in chart.series for point in series.points]
    x = axis_for((point.x for point in points), log=chart.log_x)
    y = axis_for((point.y for point in points), log=chart.log_y)
    guides = [number for number, series in enumerate(named) if series.guide]
    legend, used = _legend([series.label for series in named], from_top=TOP, guides=guides)
    if layers:
        legend, used = join(legend, _depth_legend(layers, TOP + used)), used + LINE
    top, height = TOP + used + GAP, HEIGHT + used
    inner = (LEFT, top, WIDTH - LEFT - RIGHT, height - top - BOTTOM)
    drawn = [_series(series, None, x, y, inner) for series in layers]
    drawn += [_series(series, number, x, y, inner) for number, series in enumerate(named)]
    return _frame(chart, WIDTH, height, legend, _grid(chart, x, y, inner), *drawn)


@svg.register
def _heat_map(heat: HeatMap) -> Markup:
    cell = max(SMALLEST_CELL, min(40, (WIDTH - LEFT - RIGHT) // heat.columns))
    width = max(WIDTH, LEFT + RIGHT + cell * heat.columns)
    pieces = []
    for row, (label, cells) in enumerate(zip(heat.rows, heat.cells, strict=True)):
        top = TOP + 26 * row
        pieces.append(_text(LEFT - 8, top + 17, cut(label, 9), anchor="end"))
        for layer, entry in enumerate(cells):
            if entry is None:
                continue
            colour = shade(1 - heat.warmth(entry.value))
            box = tag(
                "rect",
                x=LEFT + cell * layer,
                y=top,
                width=cell - 1,
                height=25,
                fill="#{:02x}{:02x}{:02x}".format(*colour),
            )
            text = _cell_text(entry.text, LEFT + cell * (layer + 0.5), top + 17, ink_on(colour))
            pieces.append(tag("g", box, text, tag("title", entry.tip), class_="mark"))
    bottom = TOP + 26 * len(heat.rows)
    pieces += [
        _text(LEFT + cell * (layer + 0.5), bottom + 15, layer, anchor="middle")
        for layer in range(heat.columns)
    ]
    pieces.append(_text(LEFT - 8, bottom + 15, "layer", anchor="end"))
    return _frame(heat, width, bottom + 50, *pieces, _scale_legend(heat, bottom + 28))


@svg.register
def _bars(bars: Bars) -> Markup:
    legend, used = _legend(bars.names, from_top=TOP)
    room = WIDTH - 2 * RIGHT
    pieces = []
    top = TOP + used + 6
    for label, segments in bars.rows:
        total, left = sum(segments.values()), float(RIGHT)
        name = cut(label)
        pieces.append(_text(RIGHT, top + 12, f"{name}: {short(total)} {bars.unit}"))
        for number, stage in enumerate(bars.names):
            value = segments.get(stage, 0.0)
            if value > 0:
                wide = room * value / total
                tip = f"{label}, {stage}: {short(value)} {bars.unit}, {percent(value / total)}"
                box = tag(
                    "rect",
                    tag("title", tip),
                    x=_n(left),
                    y=top + 18,
                    width=_n(wide),
                    height=22,
                    fill=colour_of(number),
                    class_=f"mark f{number % 10}",
                )
                pieces.append(tag("g", box, data_series=number))
                left += wide
        top += 52
    return _frame(bars, WIDTH, top, legend, *pieces)


def _frame(figure: Figure, width: int, height: float, *pieces: Markup) -> Markup:
    """The outer element: `role=img` with a label, because the numbers are in the table beside it."""
    return tag(
        "svg",
        tag("rect", width=width, height=_n(height), fill=PAPER, class_="paper"),
        _text(RIGHT, 20, cut(figure.title, LONGEST_TITLE), weight="bold"),
        *pieces,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {_n(height)}",
        width=width,
        height=_n(height),
        role="img",
        aria_label=f"{figure.title}. {figure.caption}",
        font_family="system-ui, sans-serif",
        font_size="12",
    )


def _grid(chart: Chart, x: Axis, y: Axis, inner: tuple[int, int, int, int]) -> Markup:
    left, top, width, height = inner
    pieces = []
    for tick in y.ticks:
        at = _n(top + height * (1 - y.place(tick)))
        pieces.append(tag("path", d=f"M{left},{at}h{width}", stroke=FAINT, class_="faint", fill="none"))
        pieces.append(_text(left - 8, float(at) + 4, short(tick), anchor="end"))
    for tick in x.ticks:
        at = _n(left + width * x.place(tick))
        pieces.append(tag("path", d=f"M{at},{top + height}v4", stroke=INK, class_="line", fill="none"))
        pieces.append(_text(at, top + height + 17, short(tick), anchor="middle"))
    pieces.append(_text(left + width / 2, top + height + 36, chart.x_label, anchor="middle"))
    middle = f"translate(14,{_n(top + height / 2)}) rotate(-90)"
    pieces.append(tag("g", _text(0, 0, chart.y_label, anchor="middle"), transform=middle))
    return join(*pieces)


def _series(series: Series, number: int | None, x: Axis, y: Axis, inner: tuple[int, int, int, int]) -> Markup:
    """Lines first, marks on top; a layer has its depth's colour, anything else that of its number."""
    left, top, width, height = inner
    colour = depth_colour(series.depth or 0.0) if number is None else colour_of(number)
    places = [
        (_n(left + width * x.place(point.x)), _n(top + height * (1 - y.place(point.y))))
        for point in series.points
    ]
    pieces = []
    if series.line:
        path = "M" + "L".join(f"{across},{down}" for across, down in places)
        if series.guide:
            pieces.append(tag("path", d=path, **GUIDE))
        else:
            css = "stroke" if number is None else f"stroke s{number % 10}"
            pieces.append(tag("path", d=path, fill="none", stroke=colour, stroke_width="1.6", class_=css))
    if series.marks:
        shape = SHAPES[0 if number is None else number % len(SHAPES)]
        size = " scale(0.6)" if number is None else ""
        css = "mark" if number is None else f"mark f{number % 10}"
        for point, (across, down) in zip(series.points, places, strict=True):
            if not point.tip:
                continue
            move = f"translate({across},{down}){size}"
            tip = tag("title", point.tip)
            pieces.append(tag("path", tip, d=shape, transform=move, fill=colour, class_=css))
    kind = "series layer" if number is None else "series"
    return tag("g", *pieces, class_=kind, data_series=number)


def _split(chart: Chart) -> tuple[list[Series], list[Series]]:
    """Series that are named in the legend, and those that are one of many layers."""
    layers = [series for series in chart.series if series.depth is not None]
    return [series for series in chart.series if series.depth is None], layers


def _legend(labels: Sequence[str], *, from_top: int, guides: Sequence[int] = ()) -> tuple[Markup, int]:
    """Names in as many lines as they need; gives back the height as well."""
    pieces, across, line = [], float(RIGHT), 0
    for number, label in enumerate(cut(label) for label in labels):
        wide = 24 + LETTER * len(label)
        if across > RIGHT and across + wide > WIDTH - RIGHT:
            across, line = float(RIGHT), line + 1
        down = from_top + LINE * line
        move = f"translate({_n(across + 5)},{down + 4})"
        css = f"f{number % 10}"
        shape = SHAPES[number % len(SHAPES)]
        if number in guides:
            key = tag("path", d="M-5,0h10", transform=move, **GUIDE)
        else:
            key = tag("path", d=shape, transform=move, fill=colour_of(number), class_=css)
        pieces.append(tag("g", key, _text(across + 14, down + 8, label), data_key=number))
        across += wide
    return join(*pieces), LINE * (line + 1) if labels else 0


def _depth_legend(layers: list[Series], down: int) -> Markup:
    """A few steps from the first layer's colour to the last one's."""
    steps = [
        tag("rect", x=RIGHT + 62 + 12 * n, y=down, width=12, height=8, fill=depth_colour(n / 7))
        for n in range(8)
    ]
    return join(
        _text(RIGHT, down + 8, layers[0].label), *steps, _text(RIGHT + 166, down + 8, layers[-1].label)
    )


def _scale_legend(heat: HeatMap, down: float) -> Markup:
    pieces = [_text(LEFT, down + 10, f"{percent(heat.coldest, digits=0)} {heat.unit}")]
    start = LEFT + 110
    for n in range(11):
        colour = "#{:02x}{:02x}{:02x}".format(*shade(1 - n / 10))
        pieces.append(tag("rect", x=start + 14 * n, y=_n(down), width=14, height=12, fill=colour))
    pieces.append(_text(start + 162, down + 10, percent(heat.hottest, digits=0)))
    return join(*pieces)


def _cell_text(text: str, x: float, y: float, ink: str) -> Markup:
    """Its ink goes with the cell, not with the page."""
    return tag("text", text, x=_n(x), y=_n(y), text_anchor="middle", fill=ink, font_size="11")


def _text(
    x: float | str, y: float, text: object, *, anchor: str | None = None, weight: str | None = None
) -> Markup:
    across = x if isinstance(x, str) else _n(x)
    return tag(
        "text", text, x=across, y=_n(y), text_anchor=anchor, font_weight=weight, fill=INK, class_="ink"
    )


def _n(value: float) -> str:
    """A coordinate: a tenth of a pixel is enough, and the same everywhere."""
    return f"{value:.1f}".removesuffix(".0")
