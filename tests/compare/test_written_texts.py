"""A recipe's texts that a model writes: once, by the model that is named, and never over somebody's file."""

from pathlib import Path
from typing import Any

import pytest
from compare_recipes import RECIPE

from tiny_models import save_tiny
from trisect.calibrate.synthetic import SampleConfig, receipt_beside, write_synthetic
from trisect.compare.recipe import Recipe, WrittenText
from trisect.compare.runner import make_texts
from trisect.errors import TrisectError
from trisect.models import load_model
from trisect.support.checks import validated

WORDS = {"samples": 3, "length": 16, "batch_size": 2}


def recipe_with(entry: dict[str, Any]) -> Recipe:
    return validated(Recipe, {**RECIPE, "texts": [entry]})


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model")
    return {"file": "runs/own.jsonl", "by": "model", **WORDS}


def test_the_named_model_writes_what_sample_would_write(entry: dict[str, Any]) -> None:
    recipe = recipe_with(entry)
    (text,) = recipe.texts
    assert isinstance(text, WrittenText)
    assert (text.by, text.words) == ("model", SampleConfig(**WORDS))
    told: list[tuple[str, int, int]] = []
    make_texts(recipe, progress=lambda *now: told.append(now))
    assert told[-1][1:] == (64, 64)  # two batches of two texts
    loaded, alone = load_model("model"), Path("alone.jsonl")
    write_synthetic(loaded.model, loaded.tokenizer, SampleConfig(**WORDS), alone)
    assert Path("runs/own.jsonl").read_bytes() == alone.read_bytes()


def test_a_second_run_leaves_the_text_alone(entry: dict[str, Any]) -> None:
    make_texts(recipe_with(entry))
    path = Path(entry["file"])
    before = path.stat().st_mtime_ns
    make_texts(recipe_with(entry))
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize("kept", ["no receipt", "other settings", "no recipe"])
def test_a_file_that_came_about_otherwise_is_refused_and_kept(entry: dict[str, Any], kept: str) -> None:
    make_texts(recipe_with(entry))
    path = Path("runs/own.jsonl")
    if kept == "no receipt":
        receipt_beside(path).unlink()
    if kept == "no recipe":
        receipt_beside(path).write_text('{"recipe": 3}')
    changed = {**entry, "seed": 1} if kept == "other settings" else entry
    before = path.read_bytes()
    with pytest.raises(TrisectError, match="remove both, or name another file"):
        make_texts(recipe_with(changed))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "runs/own.txt"}, r"name a \.jsonl file"),
        ({"file": "../own.jsonl"}, "below the current folder"),
        ({"by": 3}, "by must be a valid string"),
        ({"temperature": 0}, "greater than 0"),
        ({"every": 2}, "every"),
    ],
)
def test_entries_that_cannot_be_meant_are_refused_by_place(
    entry: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrisectError, match=rf"texts\[0\].*{message}"):
        recipe_with({**entry, **change})
