"""The plan as a picture: the share that each component of each layer keeps.

Of its width, or of its parameters where linear maps are factored and widths stay.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

from trisect.errors import TrisectError
from trisect.plan.budget import matrix_parameters
from trisect.records.parts import COMPONENTS
from trisect.records.shapes import LayerShape, ModelShape
from trisect.support.files import new_file

FORMATS = ("png", "svg")
LAYERS_PER_ROW = 24
"""Fits a line of 120 characters."""
COLD, HOT = (232, 240, 248), (178, 24, 43)
"""Untouched, and cut to nothing."""


def kept_shares(before: ModelShape, after: ModelShape) -> dict[str, list[float]]:
    """Component -> share kept, layer by layer."""
    pairs = list(zip(before.layers, after.layers, strict=True))
    return {component: [_kept(old, new, component) for old, new in pairs] for component in COMPONENTS}


def _kept(old: LayerShape, new: LayerShape, component: str) -> float:
    if new.linears:
        return matrix_parameters(new, component) / matrix_parameters(old, component)
    return new.width(component) / old.width(component)


def heat_tables(before: ModelShape, after: ModelShape) -> Iterator[Table]:
    """The heat map for a terminal, in per cent, a few layers to a table; colours where there are any."""
    shares = kept_shares(before, after)
    for start in range(0, len(before.layers), LAYERS_PER_ROW):
        layers = range(start, min(start + LAYERS_PER_ROW, len(before.layers)))
        columns = (Column(str(layer), justify="right", min_width=3) for layer in layers)
        table = Table("% kept", *columns, box=None, padding=(0, 1, 0, 0), show_edge=False)
        for component in COMPONENTS:
            table.add_row(component.upper(), *(_cell(shares[component][layer]) for layer in layers))
        yield table


def write_heatmap(path: str | Path, before: ModelShape, after: ModelShape, *, title: str = "") -> Path:
    """Draw the heat map as PNG or SVG, by suffix; the same plan gives the same bytes."""
    kind = check_heatmap(path)
    import matplotlib
    from matplotlib.figure import Figure

    shares = kept_shares(before, after)
    num_layers = len(before.layers)
    # Without the salt, SVG ids are random; without an explicit None, the date goes into the file.
    with matplotlib.rc_context({"svg.hashsalt": "trisect", "svg.fonttype": "none"}):
        figure = Figure(figsize=(max(5.0, 1.6 + 0.34 * num_layers), 2.3), dpi=120, layout="constrained")
        _draw(figure, [shares[component] for component in COMPONENTS], title=title)
        with new_file(path) as partial:
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(partial, format=kind, metadata=metadata)
    return Path(path)


def check_heatmap(path: str | Path) -> str:
    """The picture's format; refuses, before any work, what cannot be drawn."""
    kind = Path(path).suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise TrisectError(f"Cannot draw a heat map as {Path(path).name!r}; name a .png or .svg file.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise TrisectError(
            "Drawing a heat map needs matplotlib: pip install 'trisect[plots]' (without --heatmap, the plan "
            "is shown as text)."
        ) from error
    return kind


def _draw(figure: Any, rows: list[list[float]], *, title: str) -> None:
    axes = figure.subplots()
    image = axes.imshow(rows, vmin=0, vmax=1, cmap=_colours(), aspect="auto")
    axes.set_yticks(range(len(COMPONENTS)), [component.upper() for component in COMPONENTS])
    axes.set_xlabel("layer")
    axes.set_title(title, fontsize=9)
    for row, shares in enumerate(rows):
        for layer, share in enumerate(shares):
            axes.text(
                layer,
                row,
                f"{100 * share:.0f}",
                ha="center",
                va="center",
                fontsize=7,
                color=ink_on(shade(share)),
            )
    figure.colorbar(image, ax=axes, label="share kept", pad=0.01)


def _colours() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    ends = [tuple(channel / 255 for channel in end) for end in (HOT, COLD)]
    return LinearSegmentedColormap.from_list("kept", ends)


def _cell(share: float) -> Text:
    colour = shade(share)
    ink = ink_on(colour)
    return Text(f"{100 * share:.0f}", style=Style(color=ink, bgcolor="#{:02x}{:02x}{:02x}".format(*colour)))


def shade(share: float) -> tuple[int, int, int]:
    """The colour of a share kept, red, green, blue."""
    red, green, blue = (
        round(hot + min(1.0, max(0.0, share)) * (cold - hot)) for hot, cold in zip(HOT, COLD, strict=True)
    )
    return red, green, blue


def ink_on(colour: tuple[int, int, int]) -> str:
    """What can be read on a colour."""
    return "white" if sum(colour) < 380 else "black"
