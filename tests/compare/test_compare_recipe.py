"""Reading a recipe: every mistake is named, every cell has its own key."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compare_recipes import NUM_CELLS, RECIPE, write_recipe

import trisect.compare.check as check
from trisect.cli import main
from trisect.compare import Folder, load_recipe
from trisect.compare.cells import cells_of
from trisect.compare.check import dry_run
from trisect.compare.read import recipe_from
from trisect.errors import TrisectError

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = sorted((ROOT / "experiments" / "recipes").glob("*.yaml"))


def changed(path: str, value: Any) -> dict[str, Any]:
    """RECIPE with one value put at a path such as models.0.source."""
    data: Any = deepcopy(RECIPE)
    here = data
    *steps, last = path.split(".")
    for step in steps:
        here = here[int(step) if step.isdecimal() else step]
    here[int(last) if last.isdecimal() else last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("modles", [], "'modles'. Did you mean models"),
        ("models.0.sorce", "x", "models[0]: Unknown key 'sorce'. Did you mean source"),
        ("methods.1.alocate", "uniform", "methods[1]: Unknown key 'alocate'. Did you mean allocate"),
        ("methods.0", "a4", "methods[0]: Unknown method 'a4'"),
        ("methods.1.parts", ["qk", "mlp"], "clover does not change mlp"),
        ("methods.1.models", ["big llama"], "Unknown model of this recipe 'big llama'"),
        ("methods.1", {"name": "wanda-2:4"}, "give it ratios: [0.5]"),
        ("methods.1", {"name": "a3", "label": "a3"}, "two entries have the label 'a3'"),
        ("methods.1.ratio", 0.5, "Unknown key 'ratio'. Did you mean ratios"),
        ("calibration.smaples", 4, "calibration: Unknown key 'smaples'. Did you mean samples"),
        ("calibration.samples", 0, "samples must be a whole number"),
        ("evaluation.0.windows", "all", "evaluation[0]: windows must be a whole number"),
        ("evaluation.1.name", "fox", "two entries have the name 'fox'"),
        ("figures.0", "pie", "figures[0]: Unknown kind of figure 'pie'"),
        ("figures.1.evaluation", "cat", "figures[1]: Unknown evaluation of this recipe 'cat'"),
        ("ratios", [0.25, 1.5], "above 0 and below 1"),
        ("ratios", "many", "ratios must be a list"),
        ("align", 7, "Cannot align widths to 7"),
        ("models", [], "models must be a list with at least one entry"),
        ("models.0", {"name": "x"}, "models[0]: the key source is missing"),
        ("name", "../up", "is to be a folder's name"),
        ("tasks", "juggling", "tasks: Unknown task 'juggling'"),
        ("kv", "yes please", "kv must be true or false"),
    ],
)
def test_a_mistake_is_named_with_its_place(path: str, value: Any, message: str) -> None:
    with pytest.raises(TrisectError) as caught:
        recipe_from(changed(path, value))
    assert message in str(caught.value)


def test_the_command_says_it_on_one_line(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recipe(bench, ratois=[0.5])
    assert main(["compare", "small.yaml"]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: small.yaml: Unknown key 'ratois'. Did you mean ratios")
    assert error.count("\n") == 0


def test_models_may_have_their_own_data_and_methods_their_own_models() -> None:
    data = deepcopy(RECIPE)
    own = {"source": "builtin", "samples": 2, "length": 16}
    data["models"].append({"name": "other", "source": "o", "calibration": own})
    data["methods"][0] = {"name": "a3", "models": ["other"]}
    recipe = recipe_from(data)
    assert [model.calibrations[0].config.samples for model in recipe.models] == [4, 2]
    cells = [cell for cell in cells_of(recipe) if cell.label == "a3"]
    assert {cell.model.name for cell in cells} == {"other"}


def test_a_key_is_of_what_decides_the_result_and_of_nothing_else() -> None:
    recipe = recipe_from(RECIPE)
    keys = [cell.key for cell in cells_of(recipe)]
    assert len(set(keys)) == len(keys) == NUM_CELLS

    def keys_after(path: str, value: Any) -> list[str]:
        return [cell.key for cell in cells_of(recipe_from(changed(path, value)))]

    assert keys_after("title", "Another title") == keys
    assert keys_after("methods.1.label", "baseline") == keys
    assert keys_after("figures", []) == keys
    assert keys_after("evaluation.1.name", "hound") == keys
    assert not set(keys_after("evaluation.0.windows", 1)) & set(keys)
    assert not set(keys_after("models.0.dtype", "bfloat16")) & set(keys)
    # The dense model does not care about calibration.
    assert set(keys_after("calibration.seed", 1)) & set(keys) == {keys[0]}
    cell = next(cell for cell in cells_of(recipe) if cell.config is not None)
    assert cell.config is not None
    assert replace(cell, config=replace(cell.config, allocate="uniform")).key == cell.key


def test_a_calibration_study_has_a_cell_for_each_set() -> None:
    sets = [{"name": name, "source": "builtin", "seed": seed} for seed, name in enumerate("ab")]
    recipe = recipe_from({**RECIPE, "calibration": sets})
    assert len(list(cells_of(recipe))) == 1 + 2 * (NUM_CELLS - 1)
    last = list(cells_of(recipe))[-1]
    assert last.describe().endswith("calibrated on b")


def test_a_dry_run_lists_cells_and_what_they_would_remove(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(finished.rglob("*"))
    assert main(["compare", "small.yaml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"{NUM_CELLS} cells, 1 to run" in shown
    assert "25.0%" in shown
    assert "would fail" in shown
    assert sorted(finished.rglob("*")) == before


def test_a_dry_run_needs_neither_model_nor_data(
    bench: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "hub_answers", lambda: False)
    write_recipe(bench, models=["no-such-user/no-such-model"], calibration={"source": "no/text.txt"})
    assert main(["compare", "small.yaml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "no-such-model is not at hand" in shown
    assert "no file no/text.txt" in shown


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_committed_recipe_is_sound(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "shape_at_hand", lambda model: None)
    monkeypatch.chdir(ROOT)
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    cells, _ = dry_run(recipe, Folder(path=tmp_path))
    assert len(cells) > 1
    assert {entry.state for entry in cells} == {"to run"}
