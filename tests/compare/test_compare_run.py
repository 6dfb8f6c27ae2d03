"""Running a recipe: each cell at most once, failures written down, nothing lost when it stops."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from compare_recipes import IMPOSSIBLE, NUM_CELLS, write_recipe

import trisect.compare.runner as runner
from trisect.cli import main
from trisect.compare import Folder, RunCounts, load_recipe, run_recipe
from trisect.compare.recipe import cells_of
from trisect.errors import TrisectError
from trisect.support.files import locked


class Calls:
    """Counts the calls of a function and passes them on, or fails from the given call on."""

    def __init__(self, function: Any, *, stop: BaseException | None = None, after: int = 0):
        self.function, self.stop, self.after, self.count = function, stop, after, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.stop is not None and self.count > self.after:
            raise self.stop
        return self.function(*args, **kwargs)


@pytest.fixture
def compressions(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls(runner.compress)
    monkeypatch.setattr(runner, "compress", calls)
    return calls


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in folder.rglob("*") if path.is_file() and "cache" not in path.parts]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_a_failing_cell_is_reported_and_the_others_go_on(first_run: tuple[Path, RunCounts]) -> None:
    folder, tally = first_run
    assert len(tally.ran) == NUM_CELLS - 1
    assert len(tally.failed) == 1
    records = [json.loads(path.read_text()) for path in (folder / "cells").iterdir()]
    (failed,) = [record for record in records if "error" in record]
    assert "out of reach" in failed["error"]
    assert failed["method"] == IMPOSSIBLE


def test_a_second_run_does_no_work(
    finished: Path, compressions: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loads = Calls(runner.load_model)
    monkeypatch.setattr(runner, "load_model", loads)
    assert main(["compare", "small.yaml", "--keep-errors", "--quiet"]) == 1  # the one failure is in the table
    before = contents(finished)
    assert main(["compare", "small.yaml", "--keep-errors", "--quiet"]) == 1
    assert compressions.count == loads.count == 0
    assert contents(finished) == before
    assert f"0 cells run, {NUM_CELLS} done before" in capsys.readouterr().out


def test_failed_cells_are_tried_again_unless_told_not_to(
    finished: Path, compressions: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["compare", "small.yaml", "--quiet"]) == 1
    assert compressions.count == 1
    # A cell that works at last loses its error.
    (key,) = run_recipe(load_recipe("small.yaml"), Folder(path=finished)).failed
    assert Folder(path=finished).receipt(key) is None
    monkeypatch.setattr(runner.ModelRun, "run", lambda run, cell: {"method": cell.label})
    assert run_recipe(load_recipe("small.yaml"), Folder(path=finished)).ran == [key]
    assert Folder(path=finished).receipt(key) == {"method": IMPOSSIBLE}


def test_an_interrupted_run_goes_on_where_it_stopped(bench: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, folder = load_recipe("small.yaml"), Folder(path=bench / "out")
    stops = Calls(runner.compress, stop=KeyboardInterrupt(), after=1)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "compress", stops)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(recipe, folder, only=["clover"])
    receipts = list((folder.path / "cells").iterdir())
    assert len(receipts) == 2  # the dense model and one cell, both whole
    assert all(json.loads(path.read_text())["perplexity"] for path in receipts)
    tally = run_recipe(recipe, folder, only=["clover"])
    assert (tally.done, len(tally.ran)) == (2, 1)


def test_only_can_name_models_and_methods(bench: Path, compressions: Calls) -> None:
    twice = [{"name": name, "source": "tiny", "dtype": "float32"} for name in ("one", "two")]
    recipe = load_recipe(write_recipe(bench, models=twice, methods=["a3", "clover"], parts=["qk", "ov"]))
    folder = Folder(path=bench / "out")
    assert len(run_recipe(recipe, folder, only=["two", "clover"]).ran) == 1 + 2
    assert compressions.count == 2
    assert len(run_recipe(recipe, folder, only=["two"]).ran) == 2
    with pytest.raises(TrisectError, match="three"):
        run_recipe(recipe, folder, only=["three"])


def test_methods_on_linear_maps_are_counted_as_they_are(bench: Path) -> None:
    methods = ["svd-llm", "wanda-2:4", {"name": "palu", "parts": ["qk", "ov"], "allocate": "uniform"}]
    write_recipe(bench, methods=methods, ratios=[0.5])
    folder = Folder(path=bench / "out")
    tally = run_recipe(load_recipe("small.yaml"), folder)
    assert not tally.failed
    found = {r["method"]: r["removed"] for key in tally.ran[1:] if (r := folder.receipt(key))}
    assert found["svd-llm"]["of"] == found["wanda-2:4"]["of"] == "weights"
    assert found["svd-llm"]["chosen"] == found["svd-llm"]["decoder"] == pytest.approx(0.5, abs=0.03)
    # A mask makes nothing smaller; its zeros are what was asked for.
    assert found["wanda-2:4"]["chosen"] == found["wanda-2:4"]["zeros"] == pytest.approx(0.5, abs=1e-6)
    assert found["wanda-2:4"]["decoder"] == found["wanda-2:4"]["parameters"] == 0.0
    # With rotary heads only values can be cached narrow: half of what was asked for.
    assert found["palu"]["of"] == "KV"
    assert found["palu"]["chosen"] == found["palu"]["kv_bytes_per_token"] == pytest.approx(0.25)


def test_rank_searches_of_different_maps_share_nothing(bench: Path) -> None:
    write_recipe(bench, methods=[{"name": "asvd", "parts": [part]} for part in ("mlp", "ov")], ratios=[0.5])
    folder = Folder(path=bench / "out")
    tally = run_recipe(load_recipe("small.yaml"), folder)
    assert (len(tally.ran), tally.failed) == (3, [])
    assert not list(folder.cache.glob("curves-*.json"))


def test_receipts_are_small_and_name_no_machine(laboratory: Path, first_run: tuple[Path, RunCounts]) -> None:
    for path in (first_run[0] / "cells").iterdir():
        text = path.read_text()
        assert len(text) < 12_000
        assert str(laboratory) not in text
        receipt = json.loads(text)
        if "error" not in receipt:
            assert {"token_hash", "versions", "hardware", "commit", "seed"} <= receipt["receipt"].keys()
            assert receipt["model"]["fingerprint"]


def test_errors_name_no_machine(bench: Path) -> None:
    recipe = load_recipe("small.yaml")
    message = runner.explain(TrisectError(f"There is no file x (looked from {bench})."), recipe)
    assert message.endswith("(looked from .).")
    assert runner.explain(ZeroDivisionError("oh\n no"), recipe) == "ZeroDivisionError: oh no"


def test_a_model_that_cannot_be_loaded_fails_all_its_cells(bench: Path) -> None:
    models = [{"name": "gone", "source": "./nowhere"}, {"name": "tiny llama", "source": "tiny"}]
    write_recipe(bench, models=models, methods=[{"name": "clover", "parts": "qk,ov"}], ratios=[0.25])
    tally = run_recipe(load_recipe("small.yaml"), Folder(path=bench / "out"))
    assert (len(tally.failed), len(tally.ran)) == (2, 2)


def test_two_processes_share_a_recipe_and_no_cell_is_run_twice(bench: Path) -> None:
    """The second comes in the middle of each cell of the first, and finds it taken."""
    write_recipe(bench, methods=[{"name": "clover", "parts": "qk,ov"}], ratios=[0.25, 0.5])
    recipe, folder = load_recipe("small.yaml"), Folder(path=bench / "out")
    cells = {cell.key for cell in cells_of(recipe)}
    folder.prepare()
    taken = sorted(cells)[0]
    with folder.claimed(taken) as mine:
        assert mine
        other = run_recipe(recipe, folder)
    assert (set(other.ran), other.elsewhere) == (cells - {taken}, 1)
    last = run_recipe(recipe, folder)
    assert (last.ran, last.done, last.elsewhere) == ([taken], len(cells) - 1, 0)


def test_what_cells_share_is_waited_for(tmp_path: Path) -> None:
    order = []

    def second() -> None:
        with locked(tmp_path / "curves.lock"):
            order.append("second")

    with locked(tmp_path / "curves.lock"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(timeout=0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_the_cache_hides_itself_from_git(first_run: tuple[Path, RunCounts]) -> None:
    assert (first_run[0] / "cache" / ".gitignore").read_text() == "*\n"
