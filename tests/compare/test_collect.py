"""experiments/collect.py keeps of a run what its receipts say, and the documents' table shows it."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from trisect.compare import Folder, load_recipe
from trisect.compare.results import outcomes_of


def test_rows_are_those_of_the_cells(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Callable[[str], ModuleType]
) -> None:
    collect, tables = script("collect"), script("tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(collect, "ROOT", tmp_path)
    collect.collect(tmp_path / "small.yaml", finished)
    recipe = load_recipe("small.yaml")
    (model,) = outcomes_of(recipe, Folder(path=finished))
    rows = tables.rows_of(f"{recipe.name}.json")
    assert len(rows) == sum(outcome.receipt is not None for outcome in model)
    a3 = next(each for each in model if (each.cell.label, each.cell.ratio) == ("a3", 0.25))
    row = next(each for each in rows if each["method"] == "a3" and each["ratio"] == 0.25)
    assert list(row["perplexity"].values()) == [a3.perplexity(0), a3.perplexity(1)]
    assert row["removed"] == a3.removed()
    kept = Folder(path=finished).receipt(a3.cell.key)["losses"]["qk"]
    assert row["objective_lost"]["qk"] == kept["loss"] / kept["total"]
    shown = script("comparison_tables").comparison_table(rows)
    assert f"{a3.perplexity(0):.2f} (" in next(line for line in shown.splitlines() if line.startswith("| a3 |"))
