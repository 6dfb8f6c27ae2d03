"""Put the page and its figures on disk."""

import re
from collections.abc import Sequence
from pathlib import Path

from trisect.errors import TrisectError
from trisect.report.drawing import Figure
from trisect.report.png import has_matplotlib, png
from trisect.report.svg import svg
from trisect.support.files import atomic_write_bytes, atomic_write_text, check_writable

PAGES = (".html", ".htm")


def check_outputs(page: Path, figures: Path | None) -> None:
    """Refuse outputs that cannot be written, or that would put a page over something else."""
    if page.suffix.lower() not in PAGES:
        raise TrisectError(
            f"The report is a page, so {page.name!r} should end in .html: -o {page.stem}.html."
        )
    check_writable(page)
    if figures is not None:
        if figures.exists() and not figures.is_dir():
            raise TrisectError(f"{figures} is a file; name a folder with --figures.")
        check_writable(figures / "figure.svg")


def write_page(path: Path, text: str) -> None:
    """The page, whole or not at all."""
    atomic_write_text(path, text)


def write_figures(folder: Path, figures: Sequence[Figure]) -> list[Path]:
    """Every figure as SVG, and as PNG where matplotlib is installed."""
    kinds = ("svg", "png") if has_matplotlib() else ("svg",)
    written = []
    for figure, stem in zip(figures, file_names(figures), strict=True):
        for kind in kinds:
            path = folder / f"{stem}.{kind}"
            data = png(figure) if kind == "png" else f"{svg(figure)}\n".encode()
            atomic_write_bytes(path, data)
            written.append(path)
    return written


def file_names(figures: Sequence[Figure]) -> list[str]:
    """A stem per figure that any system can write, none twice."""
    found: list[str] = []
    for figure in figures:
        stem = re.sub(r"[^A-Za-z0-9.+_-]+", "-", figure.name)[:80].strip("-.") or "figure"
        number, name = 1, stem
        while name.lower() in (other.lower() for other in found):
            number, name = number + 1, f"{stem}-{number + 1}"
        found.append(name)
    return found
