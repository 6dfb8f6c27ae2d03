"""Every table, number and figure of the documents, made from receipts.

    python experiments/results_page.py            # or `make results`: write them
    python experiments/results_page.py --check    # or `make results CHECK=1`: name what does not match

Blocks and numbers stand between markers (experiments/tables.py); figures are docs/pictures/results/*.svg.
A file is written only if it changes. With --check nothing is written, and what differs ends in exit code 1.
"""

import argparse
import difflib
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import accuracy_tables
import comparison_tables
import experts
import machine_tables
import quantise_tables
import speed_tables
import tables
import trillion
import trust_tables
import zero_shot
from figures import drawn

from trisect.support.files import atomic_write_text

PICTURES = tables.ROOT / "docs" / "pictures" / "results"
"""A folder of its own, so that a figure whose receipt is gone is known and removed."""
MODULES = (accuracy_tables, comparison_tables, experts, machine_tables, zero_shot)
MODULES += (quantise_tables, speed_tables, trillion, trust_tables)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; say what differs")
    given = parser.parse_args(arguments)
    if given.check:
        wrong = list(differences())
        for line in wrong:
            print(line)
        return 1 if wrong else 0
    for path, text in changed().items():
        print(path.relative_to(tables.ROOT))
        if text is None:
            path.unlink()
        else:
            atomic_write_text(path, text)
    return 0


def blocks() -> tables.Blocks:
    """Name -> what makes it, for every marker in every document."""
    return {name: make for module in MODULES for name, make in module.TABLES.items()}


def documents() -> list[Path]:
    """Every document, whether or not something in it is generated."""
    return [tables.ROOT / "README.md", *sorted((tables.ROOT / "docs").glob("*.md"))]


@cache
def pictures() -> dict[Path, str]:
    """Every figure."""
    return {
        PICTURES / f"{name}.svg": drawn(draw)
        for module in MODULES
        for name, draw in getattr(module, "FIGURES", {}).items()
    }


def changed() -> dict[Path, str | None]:
    """Files that do not say what the receipts say, with what they should say; None: no receipt is left."""
    made: dict[Path, str | None] = {}
    for path in documents():
        text = path.read_text(encoding="utf-8")
        filled = tables.filled(text, blocks())
        if filled != text:
            made[path] = filled
    for path, svg in pictures().items():
        if not path.exists() or path.read_text(encoding="utf-8") != svg:
            made[path] = svg
    return made | {path: None for path in PICTURES.glob("*.svg") if path not in pictures()}


def differences() -> Iterator[str]:
    """A line for each block, number or figure that does not match, and below it what differs."""
    for path, text in changed().items():
        name = path.relative_to(tables.ROOT)
        if text is None:
            yield f"{name}: no receipt for this figure is left"
        elif path.suffix == ".svg":
            yield f"{name}: the figure is not the one that the receipts give"
        else:
            old = path.read_text(encoding="utf-8").splitlines()
            yield f"{name} differs from its receipts (- document, + receipts):"
            lines = difflib.unified_diff(old, text.splitlines(), lineterm="", n=0)
            yield from (line for line in lines if not line.startswith(("---", "+++", "@@")))


if __name__ == "__main__":
    sys.exit(main())
