"""Everything that is made from receipts: the table, its CSV, the figures, a copy of the recipe."""

from collections.abc import Sequence
from pathlib import Path

from trisect.compare import diagnostic, table
from trisect.compare.figures import draw
from trisect.compare.folder import Folder, write_changed
from trisect.compare.outcomes import ModelOutcome, outcomes_of
from trisect.compare.recipe import Recipe
from trisect.compare.values import csv_text


def write_results(recipe: Recipe, folder: Folder, source: Path, *, figures: bool = True) -> list[Path]:
    """Make all of it from the receipts there are; only what changed is written, and named."""
    models = outcomes_of(recipe, folder)
    files: dict[str, bytes] = {
        "recipe.yaml": source.read_bytes(),
        "table.md": page(recipe, models).encode(),
        "table.csv": csv_text(models).encode(),
    }
    if figures:
        drawn = draw(recipe, models)
        files |= {f"figures/{name}": svg for name, svg in drawn.items()}
        for old in (folder.path / "figures").glob("*.svg"):
            if old.name not in drawn:  # of a recipe that has changed since
                old.unlink()
    paths = {folder.path / name: data for name, data in files.items()}
    return [path for path, data in paths.items() if write_changed(path, data)]


def page(recipe: Recipe, models: Sequence[ModelOutcome]) -> str:
    """The Markdown page with its diagnostics."""
    wanted = [drawing for drawing in recipe.figures if drawing.kind == "diagnostic"]
    found = [entry for drawing in wanted for entry in diagnostic.diagnostics(models, drawing)]
    return table.markdown(recipe, models, extra=[diagnostic.markdown(entry) for entry in found])
