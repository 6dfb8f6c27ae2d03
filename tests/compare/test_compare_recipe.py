"""Reading a recipe: every mistake is named, every cell has its own key."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from compare_recipes import NUM_CELLS, RECIPE, write_recipe

import trisect.compare.runner as runner
from trisect.cli import main
from trisect.compare import Recipe, load_recipe
from trisect.compare.recipe import cells_of, hash_of
from trisect.errors import TrisectError
from trisect.support.checks import validated

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = sorted((ROOT / "experiments" / "recipes").glob("*.yaml"))


def read(data: dict[str, Any]) -> Recipe:
    return validated(Recipe, data)


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
        ("methods.1.models", ["big llama"], "Unknown model in methods[1] 'big llama'"),
        ("methods.1", {"name": "wanda-2:4"}, "give it ratios: [0.5]"),
        ("methods.1", {"name": "a3", "label": "a3"}, "two entries have the label 'a3'"),
        ("methods.1.ratio", 0.5, "Unknown key 'ratio'. Did you mean ratios"),
        ("calibration.smaples", 4, "calibration[0]: Unknown key 'smaples'. Did you mean samples"),
        ("calibration.samples", 0, "samples must be greater than or equal to 1"),
        ("evaluation.0.windows", "all", "evaluation[0].windows must be a valid integer, not 'all'"),
        ("evaluation.1.name", "fox", "two entries have the name 'fox'"),
        ("figures", ["ratio"], "Unknown key 'figures'"),
        ("texts", [], "Unknown key 'texts'"),
        ("ratios", [0.25, 1.5], "above 0 and below 1"),
        ("ratios", "many", "methods[0].ratios[0] must be a valid number, not 'many'"),
        ("align", 7, "Cannot align widths to 7"),
        ("models", [], "models must be a list with at least one entry"),
        ("models.0", {"name": "x"}, "models[0].source is missing"),
        ("name", "../up", "must be the name of a folder"),
        ("tasks", "juggling", "tasks: Unknown task 'juggling'"),
        ("models", {"source": "tiny"}, "models must be a valid list, not"),
        ("evaluation", [], "evaluation must be a list with at least one entry"),
        ("evaluation.0.windows", 0, "windows must be greater than or equal to 1, not 0"),
        ("calibration", {"samples": 4}, "calibration[0].source is missing"),
        ("assets", "../data", "write ${VARIABLE:-FOLDER}"),
        ("kv", "yes please", "kv must be a valid boolean, not 'yes please'"),
    ],
)
def test_a_mistake_is_named_with_its_place(path: str, value: Any, message: str) -> None:
    with pytest.raises(TrisectError) as caught:
        read(changed(path, value))
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
    recipe = read(data)
    assert [model.calibrations[0].config.samples for model in recipe.models] == [4, 2]
    cells = [cell for cell in cells_of(recipe) if cell.label == "a3"]
    assert {cell.model.name for cell in cells} == {"other"}


def test_a_key_is_of_what_decides_the_result_and_of_nothing_else() -> None:
    recipe = read(RECIPE)
    keys = [cell.key for cell in cells_of(recipe)]
    assert len(set(keys)) == len(keys) == NUM_CELLS

    def keys_after(path: str, value: Any) -> list[str]:
        return [cell.key for cell in cells_of(read(changed(path, value)))]

    assert keys_after("title", "Another title") == keys
    assert keys_after("methods.1.label", "baseline") == keys
    assert keys_after("evaluation.1.name", "hound") == keys
    assert not set(keys_after("evaluation.0.windows", 1)) & set(keys)
    assert not set(keys_after("models.0.dtype", "bfloat16")) & set(keys)
    # The dense model does not care about calibration.
    assert set(keys_after("calibration.seed", 1)) & set(keys) == {keys[0]}
    cell = next(cell for cell in cells_of(recipe) if cell.config is not None)
    assert cell.config is not None
    assert replace(cell, config=replace(cell.config, allocate="uniform")).key == cell.key


def test_keys_stay_as_they_are_so_that_receipts_stay_of_use() -> None:
    assert hash_of([cell.key for cell in cells_of(read(RECIPE))]) == "3f3fe0709c894f41a606"


def test_a_calibration_study_has_a_cell_for_each_set() -> None:
    sets = [{"name": name, "source": "builtin", "seed": seed} for seed, name in enumerate("ab")]
    recipe = read({**RECIPE, "calibration": sets})
    assert len(list(cells_of(recipe))) == 1 + 2 * (NUM_CELLS - 1)
    last = list(cells_of(recipe))[-1]
    assert "(b)" in last.describe()


def test_a_dry_run_shows_the_table_as_it_stands_and_needs_no_model(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "load_model", None)
    before = sorted(finished.rglob("*"))
    assert main(["compare", "small.yaml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"from {NUM_CELLS - 1} of {NUM_CELLS} receipts" in shown
    assert shown.count("failed [1]") == 1
    assert "Nothing was run." in shown
    assert sorted(finished.rglob("*")) == before


def test_assets_are_found_elsewhere_and_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    data = changed("calibration.source", "../data/a.txt:0.5+../data/b.txt:0.5")
    monkeypatch.delenv("SOME_DATA", raising=False)
    entry = {"assets": "${SOME_DATA:-../data}"}
    assert read(data | entry).located("../data/a.txt") == "../data/a.txt"
    monkeypatch.setenv("SOME_DATA", "/else/where/")
    recipe = read(data | entry)
    source = recipe.models[0].calibrations[0].config.source
    assert recipe.located(source) == "/else/where/a.txt:0.5+/else/where/b.txt:0.5"
    assert recipe.located("builtin") == "builtin"
    assert [cell.key for cell in cells_of(recipe)] == [cell.key for cell in cells_of(read(data))]
    assert runner.explain(TrisectError("no file /else/where/a.txt"), recipe) == "no file ../data/a.txt"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_committed_recipe_is_sound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert len(list(cells_of(recipe))) > 1
    assert ("../shared" in path.read_text()) == (recipe.assets is not None)
