"""`trisect quantize` from the command line, in the row of commands that a user types."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from quantize_models import TEXT, need_hqq, save_with_tokenizer

from trisect import quantize
from trisect.cli import main


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 30)
    return str(path)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_with_tokenizer(tmp_path_factory.mktemp("dense") / "model"))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory, dense: str, text: str) -> str:
    out = tmp_path_factory.mktemp("narrow") / "model"
    options = ["--calibration", text, "--samples", "4", "--length", "32", "--eval", "none", "--quiet"]
    options += ["--parts", "qk,ov", "--kv-ratio", "0.5"]
    assert main(["compress", dense, "-o", str(out), *options]) == 0
    return str(out)


def test_compress_quantize_eval_inspect(
    narrow: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_hqq()
    out, facts = tmp_path / "small", tmp_path / "facts.json"
    windows = ["--data", text, "--length", "32", "--windows", "4"]
    assert main(["quantize", narrow, "-o", str(out), "--bits", "4", *windows, "--json", str(facts)]) == 0
    printed = capsys.readouterr().out
    assert "bits per decoder weight, scales included" in printed
    assert f"Saved to {out}" in printed.replace("\n", "")
    said = json.loads(facts.read_text())
    assert said["before"]["per_weight"] == 32
    assert 4 < said["after"]["per_weight"] < 8
    assert said["after"]["per_original_weight"] < said["after"]["per_weight"]
    receipt = json.loads((out / "receipt.json").read_text())
    assert receipt["recipe"]["quantize"]["bits"] == 4
    assert receipt["made_from"]["recipe"]["kv_ratio"] == 0.5
    assert main(["eval", str(out), *windows, "--json", str(facts), "--quiet"]) == 0
    assert json.loads(facts.read_text())["perplexity"] == said["perplexity"]["after"]["perplexity"]
    assert main(["inspect", str(out), "--json", str(facts)]) == 0
    assert " linear maps in 4 bits (hqq)" in capsys.readouterr().out.replace("\n", " ")
    shape = json.loads(facts.read_text())
    assert set(shape["quantization"]["modules_by_bits"]) == {"4"}
    assert shape["kv_bytes_per_token"] <= 0.5 * shape["original"]["kv_bytes_per_token"]
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer("the lazy dog", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=5, min_new_tokens=5).shape[1] == ids.shape[1] + 5


def test_torchao_on_a_dense_folder(dense: str, text: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    out, facts = tmp_path / "small", tmp_path / "facts.json"
    windows = ["--data", text, "--length", "32", "--windows", "4", "--quiet", "--json", str(facts)]
    assert main(["quantize", dense, "-o", str(out), "--backend", "torchao", "--bits", "8", *windows]) == 0
    said = json.loads(facts.read_text())
    assert 8 < said["after"]["per_weight"] < 9
    values = said["perplexity"]
    assert values["after"]["perplexity"] == pytest.approx(values["before"]["perplexity"], rel=0.01)
    assert main(["eval", str(out), *windows]) == 0
    assert json.loads(facts.read_text())["perplexity"] == values["after"]["perplexity"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bits", "5"], "use one of 8, 4, 3, 2"),
        (["--group-size", "many"], "a number such as 64, or auto"),
        (["--group-size", "48"], "do not divide the 80 inputs of model.layers.0.mlp.down_proj; 16, 8 do"),
        (["--group-size", "64"], "do not divide the 48 inputs of model.layers.0.self_attn.q_proj; 16, 8 do"),
        (["--backend", "awq"], "Known: hqq, torchao"),
        (["--backend", "torchao"], "--bits 8 without"),
        (["--parts", "heads"], "Known: mlp, ov, qk"),
        (["--data", "no-such-file.txt"], "no-such-file.txt"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    options: list[str], message: str, dense: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_hqq()
    assert main(["quantize", dense, "-o", str(tmp_path / "out"), "--quiet", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("backend", ["hqq", "torchao"])
def test_a_missing_library_is_named_before_a_model_is_loaded(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("hqq.core.quantize", "torchao.quantization"):
        monkeypatch.setitem(sys.modules, name, None)
    options = ["--backend", backend, "--bits", "8"]
    assert main(["quantize", "no-such/model", "-o", str(tmp_path / "out"), *options]) == 2
    assert "pip install 'trisect[quantize]'" in capsys.readouterr().err


def test_a_full_disk_is_noticed_before_quantising(dense: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    need_hqq()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    monkeypatch.setattr(quantize, "quantize_model", lambda *_, **__: pytest.fail("it was quantised"))
    assert main(["quantize", dense, "-o", str(tmp_path / "out")]) == 2
    assert "only 0.0 MB are free" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
