"""Table, measurements and figures say what the receipts say."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from compare_recipes import write_recipe

from tiny_models import tiny
from trisect.cli import main
from trisect.compare import Folder, RunCounts, load_recipe, write_results
from trisect.compare.results import CellOutcome, draw, measurements, outcomes_of, page
from trisect.compare.runner import chosen_weights
from trisect.config import CompressConfig
from trisect.errors import TrisectError
from trisect.models import layer_views, shape_of
from trisect.plan import budget_of


def model_outcome(folder: Path) -> Sequence[CellOutcome]:
    (model,) = outcomes_of(load_recipe("small.yaml"), Folder(path=folder))
    return model


def cell(model: Sequence[CellOutcome], method: str, ratio: float = 0.25) -> CellOutcome:
    return next(each for each in model if (each.cell.label, each.cell.ratio) == (method, ratio))


def change_receipt(folder: Path, outcome: CellOutcome, **removed: Any) -> None:
    path = Folder(path=folder).receipt_path(outcome.cell.key)
    receipt = json.loads(path.read_text())
    receipt["removed"].update(removed)
    path.write_text(json.dumps(receipt))


def table(folder: Path) -> str:
    recipe = load_recipe("small.yaml")
    return page(recipe, outcomes_of(recipe, Folder(path=folder)))


def row(text: str, label: str, ratio: str = "25%") -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {label} | {ratio} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_dense_first_and_every_method_once(finished: Path) -> None:
    text = table(finished)
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    cells = [tuple(entry.strip() for entry in line.split("|")[1:3]) for line in lines]
    methods = ("a3", "clover qk,ov", "a3 qk,ov", "a3 qk", "a3 ov")
    assert cells[:7] == [("method", "ratio"), ("dense", ""), *((name, "25%") for name in methods)]
    assert len(cells) == len(set(cells))
    a3 = cell(model_outcome(finished), "a3")
    assert row(text, "a3")[2] == "25%"
    assert row(text, "a3")[3].strip("*").startswith(f"{a3.perplexity(0):.2f} (")


def test_only_rows_that_cut_the_same_parts_compete(finished: Path) -> None:
    text, model = table(finished), model_outcome(finished)
    rows = {each.cell.row: each.perplexity(0) for each in model if each.cell.ratio == 0.25}
    better = min("clover qk,ov", "a3 qk,ov", key=lambda label: rows[label] or 0.0)
    bold = [label for label in rows if "**" in row(text, label)[3]]
    assert bold == [better]


def test_a_failed_cell_stands_in_the_table_with_its_error(finished: Path) -> None:
    text = table(finished)
    assert "failed [1]" in row(text, "a3 ov", "99%")
    assert "[1] tiny llama, a3 ov at 0.99: A ratio of 0.99 is out of reach" in text


def test_a_missed_ratio_is_marked(finished: Path) -> None:
    assert "(!)" not in table(finished)
    outcome = cell(model_outcome(finished), "a3")
    step = outcome.removed("step")
    assert step is not None
    change_receipt(finished, outcome, chosen=0.25 + 0.99 * step)
    assert "(!)" not in table(finished)
    change_receipt(finished, outcome, chosen=0.25 + 1.01 * step)
    text = table(finished)
    assert row(text, "a3")[2].endswith("% (!)")
    assert "(!) misses the asked ratio by more than one alignment step." in text


def test_tasks_have_columns_and_a_mean(finished: Path) -> None:
    model = model_outcome(finished)
    for number, outcome in enumerate([model[0], cell(model, "clover qk,ov"), cell(model, "a3 qk,ov")]):
        path = Folder(path=finished).receipt_path(outcome.cell.key)
        scores = {"piqa": {"metric": "acc", "value": 0.8 - 0.1 * number}}
        scores["lambada"] = {"metric": "acc", "value": 0.6 - 0.1 * number}
        path.write_text(json.dumps({**json.loads(path.read_text()), "tasks": {"scores": scores}}))
    text = table(finished)
    assert "| piqa | lambada | mean accuracy |" in text
    assert row(text, "dense", "")[5:8] == ["0.8000", "0.6000", "0.7000"]
    assert row(text, "clover qk,ov")[5:8] == ["**0.7000**", "**0.5000**", "**0.6000**"]
    lines = list(measurements([model_outcome(finished)]))
    assert [line["data"] for line in lines if line.get("metric") == "accuracy"] == ["piqa", "lambada"] * 3


def test_cells_that_were_not_run_are_said_to_be(finished: Path) -> None:
    Folder(path=finished).receipt_path(cell(model_outcome(finished), "a3", 0.5).cell.key).unlink()
    assert "not run" in row(table(finished), "a3", "50%")


def test_receipts_of_two_models_in_one_table_are_noticed(finished: Path) -> None:
    path = Folder(path=finished).receipt_path(model_outcome(finished)[0].cell.key)
    receipt = json.loads(path.read_text())
    receipt["model"]["fingerprint"] = "another"
    receipt["perplexity"][1]["token_hash"] = "another"
    path.write_text(json.dumps(receipt))
    text = table(finished)
    assert "not all of the same weights" in text
    assert "topics: the receipts were not all measured on the same tokens" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"perplexity": []}, "perplexity must be a list for 2 texts"),
        ({"perplexity": [{"perplexity": "low", "token_hash": "x"}] * 2}, "perplexity must be a valid number"),
        ({"counts": {}}, "kv_bytes_per_token is missing"),
        ({"receipt": 3}, "is missing"),
        ({"removed": {"of": "weights"}}, "removed.chosen is missing"),
        ({"removed": None}, "removed is missing"),
        ({"notes": [7]}, "notes[0] must be a valid string, not 7"),
        ({"tasks": {"scores": {"piqa": {"metric": "acc", "value": True}}}}, "must be a valid number, not True"),
    ],
)
def test_a_damaged_receipt_is_refused_on_one_line(finished: Path, change: dict[str, Any], message: str) -> None:
    path = Folder(path=finished).receipt_path(cell(model_outcome(finished), "a3", 0.5).cell.key)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(TrisectError, match=r"is no receipt: .*remove it, and its cell is run again") as caught:
        table(finished)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_the_measurements_are_every_number(finished: Path) -> None:
    (model,) = models = outcomes_of(load_recipe("small.yaml"), Folder(path=finished))
    lines = list(measurements(models))
    assert len(lines) == 2 * 11 + 1  # two texts for each cell, one line for the one that failed
    assert "out of reach" in lines[-1]["error"]
    found = {(line["method"], line["ratio"], line["data"]): line for line in lines[:-1]}
    outcome = cell(model, "clover qk,ov", 0.5)
    line = found["clover qk,ov", 0.5, "topics"]
    assert (line["value"], line["increase"]) == (outcome.perplexity(1), outcome.increase(1))
    assert (line["removed"]["chosen"], line["missed"], line["parts"]) == (0.5, False, ("qk", "ov"))
    assert line["removed"]["kv_bytes_per_token"] == 0.5


def test_figures_are_the_same_bytes_every_time(finished: Path) -> None:
    pytest.importorskip("matplotlib")
    recipe, folder = load_recipe("small.yaml"), Folder(path=finished)
    (finished / "figures").mkdir()
    (finished / "figures" / "old.svg").write_text("of a recipe that has changed since")
    write_results(recipe, outcomes_of(recipe, folder), folder, Path("small.yaml"))
    drawn = {path.name: path.read_bytes() for path in (finished / "figures").iterdir()}
    assert draw(outcomes_of(recipe, folder)) == drawn
    assert sorted(drawn) == ["ratio-tiny-llama-fox.svg", "ratio-tiny-llama-topics.svg"]
    for svg in drawn.values():
        assert svg.startswith(b"<svg")
        assert b"<dc:date>" not in svg


def test_without_matplotlib_there_are_no_figures(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    recipe, folder = load_recipe("small.yaml"), Folder(path=finished)
    assert write_results(recipe, outcomes_of(recipe, folder), folder, Path("small.yaml"))
    assert not (finished / "figures").exists()


def test_json_repeats_the_measurements(finished: Path) -> None:
    assert main(["compare", "small.yaml", "--keep-errors", "--json", "r.json"]) == 1
    data = json.loads(Path("r.json").read_text())
    assert data["failed"] == 1
    assert len(data["measurements"]) == 23


def test_results_lie_beside_the_folder_of_recipes(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trisect.compare.run_recipe", lambda *_, **__: RunCounts())
    (bench / "recipes").mkdir()
    write_recipe(bench / "recipes")
    assert main(["compare", "recipes/small.yaml"]) == 0
    assert sorted(path.name for path in (bench / "results" / "small").iterdir()) == [*("recipe.yaml", "table.md")]


@pytest.mark.parametrize("name", ["llama-gqa", "mpt", "gpt2", "phi3", "gpt_neox"])
def test_shapes_and_modules_count_the_same_weights(name: str) -> None:
    model = tiny(name)
    shape = shape_of(model)
    matrices = [m.parameters() for view in layer_views(model) for m in view.projections()]
    weights = sum(p.numel() for matrix in matrices for p in matrix if p.ndim > 1)
    assert budget_of(shape).linear_parameters == chosen_weights(shape, CompressConfig(ratio=0.5)) == weights
    assert budget_of(shape).parameters == sum(p.numel() for p in model.parameters())
