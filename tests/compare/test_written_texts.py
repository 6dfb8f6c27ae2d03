"""A recipe's texts that a model writes: once, by the model that is named, and never over somebody's file."""

from pathlib import Path
from typing import Any

import pytest

from tiny_models import save_tiny
from trisect.calibrate.synthetic import SampleConfig, receipt_beside, write_synthetic
from trisect.compare.texts import WrittenText, make_texts, read_text
from trisect.errors import TrisectError
from trisect.models import load_model

WORDS = {"samples": 3, "length": 16, "batch_size": 2}


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "model")
    return {"file": "runs/own.jsonl", "by": "model", **WORDS}


def test_the_named_model_writes_what_sample_would_write(entry: dict[str, Any]) -> None:
    text = read_text(entry, "texts[0]")
    assert text == WrittenText(file="runs/own.jsonl", by="model", words=SampleConfig(**WORDS))
    told: list[tuple[str, int, int]] = []
    make_texts((text,), progress=lambda *now: told.append(now))
    assert told[-1][1:] == (64, 64)  # two batches of two texts
    loaded, alone = load_model("model"), Path("alone.jsonl")
    write_synthetic(loaded.model, loaded.tokenizer, SampleConfig(**WORDS), alone)
    assert Path("runs/own.jsonl").read_bytes() == alone.read_bytes()


def test_a_second_run_leaves_the_text_alone(entry: dict[str, Any]) -> None:
    text = read_text(entry, "texts[0]")
    make_texts((text,))
    path = Path(text.file)
    before = path.stat().st_mtime_ns
    make_texts((text,))
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize("kept", ["no receipt", "other settings", "no recipe"])
def test_a_file_that_came_about_otherwise_is_refused_and_kept(entry: dict[str, Any], kept: str) -> None:
    make_texts((read_text(entry, "texts[0]"),))
    path = Path("runs/own.jsonl")
    if kept == "no receipt":
        receipt_beside(path).unlink()
    if kept == "no recipe":
        receipt_beside(path).write_text('{"recipe": 3}')
    changed = {**entry, "seed": 1} if kept == "other settings" else entry
    before = path.read_bytes()
    with pytest.raises(TrisectError, match="remove both, or name another file"):
        make_texts((read_text(changed, "texts[0]"),))
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "runs/own.txt"}, r"name a \.jsonl file"),
        ({"file": "../own.jsonl"}, "below the current folder"),
        ({"by": 3}, "by must be text"),
        ({"temperature": 0}, "above 0"),
        ({"every": 2}, "every"),
    ],
)
def test_entries_that_cannot_be_meant_are_refused_by_place(
    entry: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrisectError, match=rf"texts\[0\].*{message}"):
        read_text({**entry, **change}, "texts[0]")
