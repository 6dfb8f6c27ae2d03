"""What is kept of a GGUF file stands for that file and for no other."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import bytewise, pieces

from tiny_models import tiny
from trisect.export import export_gguf
from trisect.models import load_model, source
from trisect.models.checkpoint import SWITCH, keep


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file, and a cache that is empty."""
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setenv("TRISECT_CACHE", str(tmp_path / "cache"))
    return export_gguf(tiny("llama-gqa"), pieces(), tmp_path / "model.gguf", kind="f32").path


def entries(file: Path) -> list[Path]:
    return sorted((file.parent / "cache" / "gguf").glob("*"))


def assert_same(found: Any, expected: Any) -> None:
    states = found.model.state_dict(), expected.model.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert found.model.config.to_dict() == expected.model.config.to_dict()
    assert found.model.stored_dtype == expected.model.stored_dtype == torch.float32
    assert found.model.name_or_path == expected.model.name_or_path
    assert found.tokenizer("hello world").input_ids == expected.tokenizer("hello world").input_ids
    assert (found.name, found.num_bytes) == (expected.name, expected.num_bytes)


def test_a_file_that_was_read_before_is_not_converted_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_model(str(file))
    assert len(entries(file)) == 1
    monkeypatch.setattr(source, "read_gguf", lambda path: pytest.fail("the file was read again"))
    assert_same(load_model(str(file)), first)


def test_another_file_of_the_same_name_is_read(file: Path) -> None:
    before = load_model(str(file))
    other = tiny("llama-gqa")
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1.0
    stamp = file.stat()
    file.unlink()
    export_gguf(other, bytewise(), file, kind="f32")
    after = load_model(str(file))
    assert file.stat().st_ino != stamp.st_ino or file.stat().st_mtime_ns != stamp.st_mtime_ns
    assert (after.model.lm_head.weight - before.model.lm_head.weight)[0, 0].item() == pytest.approx(1.0)
    assert len(after.tokenizer) != len(before.tokenizer)
    assert len(entries(file)) == 2


def test_switched_off_or_in_another_dtype_nothing_is_kept_or_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_model(str(file), dtype="bfloat16")
    assert not entries(file)
    load_model(str(file))
    monkeypatch.setenv(SWITCH, "0")
    read = []
    real = source.read_gguf
    monkeypatch.setattr(source, "read_gguf", lambda path: read.append(path) or real(path))
    load_model(str(file))
    assert read == [file]


def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (file.parent / "taken").write_text("")
    monkeypatch.setenv("TRISECT_CACHE", str(file.parent / "taken"))
    with caplog.at_level(logging.WARNING):
        loaded = load_model(str(file))
    assert "not kept for next time" in caplog.text
    assert loaded.model.config.model_type == "llama"


def test_what_another_process_has_kept_meanwhile_is_left_as_it_is(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_model(str(file))
    (kept,) = entries(file)
    before = {path: path.stat().st_mtime_ns for path in kept.iterdir()}
    with caplog.at_level(logging.WARNING):
        keep(kept, loaded.model, loaded.tokenizer)
    assert not caplog.text
    assert {path: path.stat().st_mtime_ns for path in kept.iterdir()} == before
