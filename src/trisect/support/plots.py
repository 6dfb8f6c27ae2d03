"""What figures share: one style, the same bytes for the same numbers.

No dates, no random ids, text left as text.
"""

import io
import re
from typing import Any

from trisect.errors import TrisectError

STYLE: Any = {"svg.hashsalt": "trisect", "svg.fonttype": "none", "font.size": 9.0, "axes.spines.right": False}


def need_matplotlib() -> None:
    """Or the line that says how to get it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise TrisectError(
            "Figures need matplotlib: pip install 'trisect[plots]', or --no-figures for the tables alone."
        ) from error


def file_name(*words: str) -> str:
    """A name from words that may hold anything."""
    return "-".join(re.sub(r"[^a-z0-9.+]+", "-", word.lower()).strip("-") for word in words) + ".svg"


def one_plot() -> tuple[Any, Any]:
    """A figure with one pair of axes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(5.2, 3.6))
        # Fixed margins: computed ones depend on the fonts of the machine, and take longer than the figure.
        figure.subplots_adjust(left=0.13, right=0.97, bottom=0.13, top=0.92)
        axes = figure.subplots()
    axes.spines["top"].set_visible(False)
    return figure, axes


def two_plots() -> tuple[Any, Any]:
    """A figure with two pairs of axes, side by side."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(10.4, 3.6))
        figure.subplots_adjust(left=0.06, right=0.985, bottom=0.13, top=0.92, wspace=0.14)
        axes = figure.subplots(1, 2)
    return figure, axes


def as_svg(figure: Any) -> bytes:
    """The figure as a file."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = io.BytesIO()
    with rc_context(STYLE):
        FigureCanvasSVG(figure)
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": "trisect"})
    # matplotlib ends some lines in blanks, which editors and hooks like to take off.
    lines = out.getvalue().decode("utf-8").splitlines()
    return ("\n".join(line.rstrip() for line in lines) + "\n").encode()
