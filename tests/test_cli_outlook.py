"""What is planned is said before the work, and what uneven plans make is a model like any other."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from command_line import read, run
from tiny_models import LLAMA, character_tokenizer, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.evaluate import perplexity as evaluation
from trisect.export import export_hf
from trisect.models import load_model, save_model
from trisect.pipeline import run as pipeline

QUICK = ["--samples", "8", "--length", "32", "--align", "8", "--method", "a3"]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**LLAMA, "head_dim": 48, "intermediate_size": 384})
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def stop(*_: object, **__: object) -> None:
    raise TrisectError("stopped here")


def test_a_plan_that_follows_from_sizes_is_said_before_anything_is_measured(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluation, "_check_windows", stop)  # the first thing that measuring does
    words = ["--ratio", 0.3, "--calibration", text, "--eval", text, "--eval-windows", 2, *QUICK]
    assert run("compress", folder, "-o", tmp_path / "out", *words) == 2
    printed = capsys.readouterr()
    assert "stopped here" in printed.err
    assert "\nasked to remove 30.0%, planned " in printed.out


def test_a_plan_that_needs_loss_curves_is_said_before_anything_is_solved(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipeline, "solve_layers", stop)
    curves = tmp_path / "curves.json"
    words = ["--ratio", 0.3, "--calibration", text, "--eval", "none", "--allocate", "balanced", *QUICK]
    assert run("compress", folder, "-o", tmp_path / "out", "--curves", curves, *words) == 2
    printed = capsys.readouterr()
    assert "stopped here" in printed.err
    assert "\nasked to remove 30.0%, planned " in printed.out
    assert run("plan", folder, "--curves", curves, *words[:2], *words[6:], "--json", tmp_path / "p.json") == 0
    assert capsys.readouterr().out.splitlines()[0] == printed.out.splitlines()[2]
    budget = read(tmp_path / "p.json")["budget"]
    assert 10 * budget["planned"] >= 7 * budget["before"], "no more removed than asked for"


def test_layers_of_different_widths_are_saved_loaded_and_exported(model: Any, folder: Path, tmp_path: Path) -> None:
    ids = tokens(2, 40, seed=3)
    dense = load_model(str(folder)).model
    done = pipeline.compress(dense, CompressConfig(ratio=0.25, method="a3"), tokens=tokens_from_tensor(tokens(4, 40)))
    assert len(set(done.plan.layers)) > 1
    with torch.no_grad():
        wanted = done.model(ids).logits
        save_model(done.model, character_tokenizer(), tmp_path / "native", receipt=done.receipt)
        back = load_model(str(tmp_path / "native")).model
        assert back(ids).logits.equal(wanted)
        stock = export_hf(back, None, tmp_path / "stock", dtype=torch.float32).path
        exported = transformers.AutoModelForCausalLM.from_pretrained(stock)
        assert torch.allclose(exported(ids).logits, wanted, atol=1e-4)
