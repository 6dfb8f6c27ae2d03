"""Where nobody says how long windows are, they fit into the model's context."""

import logging
from pathlib import Path

import pytest

from command_line import read, run
from tiny_models import save_tiny, tiny
from trisect.calibrate.texts import USUAL_LENGTH, usual_length

CONTEXT = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return file


def test_every_command_that_reads_text_stays_inside_the_context(
    folder: Path, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, few = tmp_path / "out", ["--samples", 3, "--quiet"]
    told = ["--ratio", 0.25, "--method", "a3", "--align", "none", "--calibration", text, "--eval", text]
    with caplog.at_level(logging.WARNING):
        assert run("compress", folder, "-o", out, *told, "--eval-windows", 2, *few) == 0
        assert run("eval", out, "--data", text, "--windows", 2, "--json", tmp_path / "e.json") == 0
        moments = ["--calibration", text, "-o", tmp_path / "m.safetensors"]
        assert run("calibrate", folder, *moments, *few) == 0
    receipt = read(out / "receipt.json")
    assert receipt["recipe"]["calibration"]["length"] == CONTEXT
    assert receipt["perplexity"]["after"]["length"] == CONTEXT
    assert read(tmp_path / "e.json")["length"] == CONTEXT
    assert "exceed" not in caplog.text


def test_a_length_that_was_asked_for_is_taken(folder: Path, text: Path, tmp_path: Path) -> None:
    arguments = ["--data", text, "--windows", 1, "--length", 2 * CONTEXT, "--json", tmp_path / "e.json"]
    assert run("eval", folder, *arguments) == 0
    assert read(tmp_path / "e.json")["length"] == 2 * CONTEXT


@pytest.mark.parametrize(
    ("words", "named"), [(["--length", 0], "--length is 0"), (["--windows", 0], "(to evaluate: --windows)")]
)
def test_a_length_or_number_of_zero_is_refused(
    words: list[object], named: str, folder: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Zero is a number that was given, not an option that was left out."""
    assert run("eval", folder, "--data", text, *words) == 2
    assert named in capsys.readouterr().err


def test_long_contexts_and_unknown_ones_leave_it_at_the_usual_length() -> None:
    model = tiny("llama-gqa")
    assert usual_length(model) == CONTEXT
    model.config.max_position_embeddings = 100_000
    assert usual_length(model) == USUAL_LENGTH
    del model.config.max_position_embeddings
    assert usual_length(model) == USUAL_LENGTH
