"""The whole way by commands, on a tiny model: compress, tune, then quantise or export."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from command_line import read, run
from export.exports import continued, greedy, pieces
from tiny_models import LLAMA
from trisect.models import load_model
from trisect.models.linear import QuantizedLinear


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the dense, the compressed and the tuned model, and their texts."""
    folder = tmp_path_factory.mktemp("round")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**LLAMA, "head_dim": 32, "intermediate_size": 256})
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "dense")
    pieces().save_pretrained(folder / "dense")
    (folder / "text.txt").write_text("hello world the wolf told the world " * 60)
    records = [{"instruction": "hello", "output": "the world told the wolf"}] * 4
    (folder / "alpaca.json").write_text(json.dumps(records))
    words = ["--ratio", 0.5, "--portable", "--samples", 2, "--length", 32, "--eval", "none", "--quiet"]
    assert run("compress", folder / "dense", "-o", folder / "small", "--calibration", folder / "text.txt", *words) == 0
    words = ["--data", folder / "alpaca.json", "--length", 300, "--epochs", 20, "--lr", 0.01, "--quiet"]
    assert run("finetune", folder / "small", "-o", folder / "tuned", *words) == 0
    return folder


def test_compress_finetune_quantize_save_load_eval(work: Path, tmp_path: Path) -> None:
    assert run("quantize", work / "tuned", "-o", tmp_path / "packed", "--bits", 8, "--quiet") == 0
    model = load_model(str(tmp_path / "packed")).model
    assert any(isinstance(module, QuantizedLinear) for module in model.modules())
    perplexities = []
    for folder in (work / "tuned", tmp_path / "packed"):
        words = ["--data", work / "text.txt", "--length", 32, "--windows", 2, "--quiet"]
        assert run("eval", folder, *words, "--json", tmp_path / "e.json") == 0
        perplexities.append(read(tmp_path / "e.json")["perplexity"])
    assert perplexities[1] == pytest.approx(perplexities[0], rel=0.05)
    assert len(read(tmp_path / "packed" / "receipt.json")["made_from"]["tuning"]) == 1


def test_a_quantised_folder_is_tuned_and_is_quantised_again(work: Path, tmp_path: Path) -> None:
    assert run("quantize", work / "small", "-o", tmp_path / "packed", "--bits", 8, "--quiet") == 0
    words = ["--data", work / "alpaca.json", "--length", 300, "--epochs", 8, "--lr", 0.01, "--quiet"]
    words += ["--eval-data", work / "text.txt", "--eval-length", 32, "--eval-windows", 2]
    assert run("finetune", tmp_path / "packed", "-o", tmp_path / "tuned", *words) == 0
    model = load_model(str(tmp_path / "tuned")).model
    assert any(isinstance(module, QuantizedLinear) for module in model.modules())
    (entry,) = read(tmp_path / "tuned" / "receipt.json")["tuning"]
    words = ["--data", work / "text.txt", "--length", 32, "--windows", 2, "--quiet"]
    assert run("eval", tmp_path / "tuned", *words, "--json", tmp_path / "e.json") == 0
    after = entry["held_out"][0]["after"]["perplexity"]
    assert read(tmp_path / "e.json")["perplexity"] == pytest.approx(after, rel=1e-5)


def test_compress_finetune_export_llama_cpp(work: Path, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (pip install xllamacpp)")
    from trisect.export.llama_cpp import LlamaCpp

    assert run("export", work / "tuned", "-o", tmp_path / "model.gguf", "--to", "gguf", "--dtype", "f32") == 0
    prompt = pieces()("hello world").input_ids
    small, tuned = (greedy(load_model(str(work / name)).model, prompt, 16) for name in ("small", "tuned"))
    assert continued(LlamaCpp(tmp_path / "model.gguf"), "hello world", 16) == tuned
    assert tuned != small
