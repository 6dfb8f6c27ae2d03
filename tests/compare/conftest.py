"""A tiny model with a character tokenizer, a text, and a recipe over them that has been run once."""

import shutil
from pathlib import Path

import pytest
from compare_recipes import write_recipe

from tiny_models import save_tiny
from trisect.compare import Folder, RunCounts, load_recipe, run_recipe


@pytest.fixture(scope="session")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the text."""
    folder = tmp_path_factory.mktemp("laboratory")
    save_tiny(folder / "tiny")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return folder


@pytest.fixture(scope="session")
def first_run(laboratory: Path) -> tuple[Path, RunCounts]:
    """The results of RECIPE and what its first run did; tests that change them take a copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(laboratory)
        write_recipe(laboratory)
        out = Path("finished")
        tally = run_recipe(load_recipe("small.yaml"), Folder(path=out))
    return laboratory / out, tally


@pytest.fixture
def bench(laboratory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own with model, text and recipe in it, entered."""
    (tmp_path / "tiny").symlink_to(laboratory / "tiny")
    shutil.copy(laboratory / "text.txt", tmp_path)
    write_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def finished(bench: Path, first_run: tuple[Path, RunCounts]) -> Path:
    """A copy of the results, beside a recipe that they are of."""
    shutil.copytree(first_run[0], bench / "small")
    return bench / "small"
