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
from pathlib import Path

import a3plus_tables
import comparison_tables as comparisons
import headline
import own_words_tables
import portable_tables
import quantise_tables
import tables
import trust_tables
from results_section import drawn, image
from results_sections import SECTIONS

from trisect.support.files import atomic_write_text

PICTURES = tables.ROOT / "docs" / "pictures" / "results"
"""A folder of its own, so that a figure whose receipt is gone is known and removed."""


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
    return {
        **{f"results-{section.name}": section.text for section in SECTIONS},
        "results-comparisons": comparison_block,
        "results-missing": missing_block,
        "headline": trust_tables.headline_table,
        "results-spread": trust_tables.spread_table,
        "calibration-texts": trust_tables.texts_table,
        "headline-machines": headline.machine_lines,
        "export": portable_tables.export_table,
        "scopes": a3plus_tables.scopes_table,
        "own-words": own_words_tables.own_words_table,
        "finetune": finetune_block,
        **quantise_tables.TABLES,
    }


def comparison_block() -> str:
    """Every recipe that was begun."""
    measured = comparisons.measured()
    made = [comparisons.section(each, _images(each.pictures)) for each in measured]
    head = "## Comparisons\n\nEach is one recipe of `trisect compare` (docs/comparison.md). "
    head += comparisons.LEGEND
    return "\n\n".join([head, *made]) if made else ""


def _images(pictures: dict[str, bytes]) -> str:
    return "\n".join(image(name) for name in pictures)


def finetune_block() -> str:
    from finetune_smollm2 import table

    return table()


def missing_block() -> str:
    """What has no receipt yet, and the command that would make one."""
    lines = [f"- {section.title}: `{section.command}`" for section in SECTIONS if not section.entries()]
    begun = {each.source for each in comparisons.measured()}
    for path in comparisons.recipes():
        if path not in begun:
            lines.append(f"- {comparisons.what(path)} `{comparisons.command(path)}`")
    lines += [f"- {line}" for line in unfinished()]
    return "## Not measured yet\n\n" + "\n".join(lines) if lines else ""


def unfinished() -> Iterator[str]:
    """Rows that an experiment has and that were not run."""
    from finetune_smollm2 import ROWS
    from quantise_pareto import STUDIES, label

    rows = [name for name in ROWS if not tables.found(f"finetune-{name}.json")]
    if rows:
        yield f"Fine-tuning, {', '.join(rows)}: `python experiments/finetune_smollm2.py`"
    models = [name for name in ("smollm2", "stories15m") if name not in portable_tables.exports()]
    if models:
        yield f"Exports, {', '.join(models)}: `python experiments/export_smollm2.py {models[0]}`"
    for name, study in STUDIES.items():
        wanted = [
            f"{b}-{label(s)}" for b in study.bases for s in (study.dense if b == "dense" else study.narrow)
        ]
        points = [point for point in wanted if not tables.found(f"quantise-{name}/{point}.json")]
        if points:
            yield f"Fewer bits, {name}, {len(points)} points: `python experiments/quantise_pareto.py {name}`"


def documents() -> list[Path]:
    """Every document, whether or not something in it is generated."""
    return [tables.ROOT / "README.md", *sorted((tables.ROOT / "docs").glob("*.md"))]


def pictures() -> dict[Path, str]:
    """Every figure that has receipts."""
    made = [drawn(section) for section in SECTIONS]
    made += [each.pictures for each in comparisons.measured()]
    return {PICTURES / name: svg.decode() for part in made for name, svg in part.items()}


def changed() -> dict[Path, str | None]:
    """Files that do not say what the receipts say, with what they should say; None: no receipt is left."""
    made: dict[Path, str | None] = {}
    for path in documents():
        text = path.read_text(encoding="utf-8")
        filled = tables.filled(text, blocks())
        if filled != text:
            made[path] = filled
    drawn = pictures()
    for path, svg in drawn.items():
        if not path.exists() or path.read_text(encoding="utf-8") != svg:
            made[path] = svg
    for path in PICTURES.glob("*.svg"):
        if path not in drawn:
            made[path] = None
    return made


def differences() -> Iterator[str]:
    """A line for each block, number or figure that does not match, and below it what differs."""
    for path, text in changed().items():
        name = path.relative_to(tables.ROOT)
        if text is None:
            yield f"{name}: no receipt for this figure is left"
        elif path.suffix == ".svg":
            yield f"{name}: the figure is not the one that the receipts give"
        else:
            yield from _wrong_parts(str(name), path.read_text(encoding="utf-8"), text)


def _wrong_parts(name: str, old: str, new: str) -> Iterator[str]:
    for was, now in zip(tables.BLOCK.finditer(old), tables.BLOCK.finditer(new), strict=True):
        if was[0] != now[0]:
            yield f"{name}: block {was[1]} differs from its receipts (- document, + receipts):"
            lines = difflib.unified_diff(was[2].splitlines(), now[2].splitlines(), lineterm="", n=0)
            yield from (line for line in lines if not line.startswith(("---", "+++", "@@")))
    for was, now in zip(tables.NUMBER.finditer(old), tables.NUMBER.finditer(new), strict=True):
        if was[0] != now[0]:
            yield f"{name}: {was[1]}#{was[2]} is {now[4]} in its receipt, {was[4]} in the document"


if __name__ == "__main__":
    sys.exit(main())
