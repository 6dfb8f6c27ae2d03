"""Streaming, going on and running out of memory, as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scale_runs import assert_same, weights

import trisect.pipeline.run as pipeline
from tiny_models import save_tiny
from trisect.cli import main
from trisect.models import load_model

FAST = ["--samples", "16", "--length", "24", "--eval-windows", "2", "--align", "none", "--ratio", "0.3"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a text, and what an undisturbed run makes of them."""
    home = tmp_path_factory.mktemp("home")
    save_tiny(home / "model", max_shard_size="60KB")
    (home / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    assert main(["compress", *words(home, home / "undisturbed")]) == 0
    return home


def words(home: Path, out: Path) -> list[str]:
    text = str(home / "text.txt")
    return [str(home / "model"), "-o", str(out), "--calibration", text, "--eval", text, "--quiet", *FAST]


def test_a_streamed_run_gives_the_same_weights_and_numbers(home: Path, tmp_path: Path) -> None:
    assert main(["compress", *words(home, tmp_path / "out"), "--stream", "on", "--states", "disk"]) == 0
    assert_same(weights(tmp_path / "out"), weights(home / "undisturbed"))
    found, expected = (json.loads((f / "receipt.json").read_text()) for f in (tmp_path / "out", home / "undisturbed"))
    assert found["losses"] == expected["losses"]
    for when in ("before", "after"):
        assert found["perplexity"][when]["nll"] == pytest.approx(expected["perplexity"][when]["nll"], rel=1e-6)
    assert main(["eval", str(tmp_path / "out"), "--data", str(home / "text.txt"), "--length", "24", "-q"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_interrupted_run_says_so_and_the_same_command_goes_on(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, seen = pipeline.solve_step, []

    def stopped(run, view, *rest):
        seen.append(view.index)
        if len(seen) == 5:
            raise KeyboardInterrupt
        return real(run, view, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "solve_step", stopped)
        assert main(["compress", *words(home, tmp_path / "out")]) == 130
    assert "keeps what is finished (files: 1); the same command goes on" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out.unfinished"]
    assert main(["compress", *words(home, tmp_path / "out"), "--seed", "5"]) == 2
    assert "config.seed was 0, is 5" in capsys.readouterr().err
    assert main(["compress", *words(home, tmp_path / "out")]) == 0
    assert_same(weights(tmp_path / "out"), weights(home / "undisturbed"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_device_that_runs_out_of_memory_gets_smaller_batches(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, sizes = pipeline.solve_layers, []

    def short_of_memory(run):
        size = run.config.calibration.batch_size
        sizes.append(size)
        for number, found in enumerate(real(run)):
            if number == 4 and (size is None or size > 3):
                raise torch.OutOfMemoryError("CUDA out of memory")
            yield found

    monkeypatch.setattr(pipeline, "solve_layers", short_of_memory)
    assert main(["compress", *words(home, tmp_path / "out"), "--batch-size", "8"]) == 0
    assert sizes == [8, 4, 2]
    assert "again with batches of 4 windows" in capsys.readouterr().out
    for name, expected in weights(home / "undisturbed").items():
        torch.testing.assert_close(weights(tmp_path / "out")[name], expected, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_torchrun_makes_one_model_of_two_processes(home: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launch += ["--nproc-per-node", "2"]
    launch += ["-m", "trisect", "compress", *words(home, tmp_path / "out"), "--method", "a3"]
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(launch, capture_output=True, text=True, timeout=300, env=settings)
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert answer.stdout.count("Saved to") == 1
    assert main(["compress", *words(home, tmp_path / "alone"), "--method", "a3"]) == 0
    models = [load_model(str(tmp_path / name)).model for name in ("out", "alone")]
    ids = torch.arange(3, 27).unsqueeze(0)
    with torch.no_grad():
        found, expected = (model(input_ids=ids).logits for model in models)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "out"]
