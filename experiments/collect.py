"""One file of rows per experiment, from the folders that `trisect compare` and benchmarks/h200.py leave.

    python experiments/collect.py                  # every recipe that has cells in experiments/results/NAME
    python experiments/collect.py --bench OUT      # rows of benchmarks/h200.py -> bench-h200.json
    python experiments/collect.py --demo FILE      # what `trisect demo --json FILE` wrote -> demo.json
    python experiments/collect.py --profile FILE   # cases of benchmarks/profile_a3plus.py -> profile-a3plus.json

Folders below experiments/results are not committed, the files beside them are; the documents read only those.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tables import RESULTS, ROOT, keep_row, write_rows

from trisect.bench.rows import related
from trisect.compare import Folder, load_recipe
from trisect.compare.results import outcomes_of
from trisect.records.parts import LINEARS
from trisect.support.checks import read_json
from trisect.support.files import write_json

RECIPES = ROOT / "experiments" / "recipes"
KEPT = ("seed", "token_hash", "date", "commit", "versions", "hardware")
"""What a row says about where it comes from."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, metavar="OUT", help="folder with rows.json")
    parser.add_argument("--demo", type=Path, metavar="FILE", help="the demo's measurement")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="seconds of a3+ by stage")
    given = parser.parse_args()
    if given.profile:
        for name, case in read_json(given.profile).items():
            keep_row("profile-a3plus.json", {"name": name, **case})
    elif given.demo:
        kept = {key: value for key, value in read_json(given.demo).items() if key not in ("plan", "losses")}
        write_json(RESULTS / "demo.json", kept)
    elif given.bench:
        common = read_json(given.bench / "rows.json")
        write_rows("bench-h200.json", related(common.pop("rows")), **common)
    else:
        collect_recipes()


def collect_recipes() -> None:
    """Every recipe that was begun."""
    for recipe in sorted(RECIPES.glob("*.yaml")):
        if (RESULTS / recipe.stem / "cells").is_dir():
            collect(recipe, RESULTS / recipe.stem)


def collect(recipe: Path, folder: Path) -> None:
    """Write the rows of one recipe."""
    loaded, cells = load_recipe(recipe), Folder(path=folder)
    rows = []
    for outcomes in outcomes_of(loaded, cells):
        rows += [_row(outcome, cells) for outcome in outcomes]
    about, command = _comment(recipe)
    head = {"title": loaded.title, "about": about, "note": loaded.note, "command": command}
    models = {model.name: model.note for model in loaded.models}
    write_rows(f"{loaded.name}.json", [row for row in rows if row], **head, models=models)


def _row(outcome: Any, folder: Folder) -> dict[str, Any]:
    """What the documents show of a cell, with where it comes from; empty where it was not run."""
    cell, receipt = outcome.cell, folder.receipt(outcome.cell.key)
    if receipt is None:
        return {}
    texts = enumerate(cell.model.evaluations)
    made: dict[str, Any] = {
        "model": cell.model.name,
        "method": cell.row,
        "ratio": cell.ratio,
        "kv_bytes_per_token": receipt["counts"]["kv_bytes_per_token"],
        "perplexity": {text.name: outcome.perplexity(at) for at, text in texts},
        "fingerprint": receipt["model"]["fingerprint"],
        "receipt": {name: receipt["receipt"][name] for name in KEPT},
    }
    if cell.config is not None:
        lost = {part: objective_lost(receipt["losses"], part) for part in cell.config.parts}
        made |= {
            "name": cell.method.name,
            "parts": list(cell.config.parts),
            "removed": outcome.removed(),
            "removed_of": receipt["removed"]["of"],
            "missed": outcome.missed,
            "zeros": receipt["removed"]["zeros"],
            "objective_lost": {part: value for part, value in lost.items() if value is not None},
            "config": {k: v for k, v in receipt["config"].items() if v not in (None, False, [])},
            "notes": list(receipt.get("notes", ())),
        }
    return made


def objective_lost(losses: Mapping[str, Mapping[str, float]], part: str) -> float | None:
    """The share of a component's local objective that was lost, over all layers."""
    entries = [losses[name] for name in (part, *LINEARS[part]) if name in losses]
    total = sum(entry["total"] for entry in entries)
    return sum(entry["loss"] for entry in entries) / total if total else None


def _comment(recipe: Path) -> tuple[str, str]:
    """A recipe's first lines: what it is about, and the command that runs it."""
    text = recipe.read_text(encoding="utf-8")
    about = re.match(r"(?:#(?!.*trisect compare).*\n)*", text)
    command = re.search(r"^#\s+(trisect compare .*)$", text, re.MULTILINE)
    assert about is not None
    said = " ".join(line.removeprefix("#").strip() for line in about[0].splitlines())
    return said, command[1] if command else f"trisect compare {recipe.relative_to(ROOT)}"


if __name__ == "__main__":
    main()
