"""`trisect export` from the command line."""

import json
import shlex
from pathlib import Path

import pytest
import torch
import transformers
from exports import compressed, pieces

from tiny_models import LLAMA
from trisect.cli import main
from trisect.export.llama_cpp import is_installed
from trisect.models import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("native") / "model"
    recipe = {"method": "a3+", "ratio": 0.3}
    return save_model(compressed("llama-gqa", "model-rates"), pieces(), out, receipt={"recipe": recipe})


def test_hf_then_gguf(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = tmp_path / "facts.json"
    assert main(["export", str(folder), "-o", str(tmp_path / "hf"), "--json", str(facts)]) == 0
    assert f'from_pretrained("{tmp_path / "hf"}")' in capsys.readouterr().out
    assert json.loads(facts.read_text())["head_width"] == 12
    assert transformers.AutoConfig.from_pretrained(tmp_path / "hf").model_type == "llama"
    target = tmp_path / "model.gguf"
    assert main(["export", str(folder), "-o", str(target), "--to", "gguf", "--dtype", "q8_0"]) == 0
    said = capsys.readouterr().out
    assert f"llama-cli -m {target}" in said
    assert ("nats apart" if is_installed() else "not tried") in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "ggml"], "Known: arena, gguf, hf"),
        (["--dtype", "f16"], "for --to gguf"),
        (["--to", "gguf", "--dtype", "bfloat16"], "for --to hf"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(folder), "-o", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_answered_with_the_command_that_makes_it_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command is typed as it stands, and what it makes is exported."""
    config = transformers.LlamaConfig(**{**LLAMA, "head_dim": 32, "intermediate_size": 256})
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    pieces().save_pretrained(tmp_path / "dense")
    (tmp_path / "text.txt").write_text("hello world hello\n" * 400)
    given = ["--ratio", "0.4", "--calibration", str(tmp_path / "text.txt"), "--samples", "2", "--length", "32"]
    assert main(["compress", str(tmp_path / "dense"), "-o", str(tmp_path / "native"), *given, "--quiet"]) == 0
    assert main(["export", str(tmp_path / "native"), "-o", str(tmp_path / "stock")]) == 2
    again = shlex.split(capsys.readouterr().err.rpartition("The nearest that can: ")[2])
    assert set(given) <= set(again)
    assert main([*again[1:], "--quiet"]) == 0
    assert main(["export", again[again.index("-o") + 1], "-o", str(tmp_path / "stock"), "--quiet"]) == 0
    size = (tmp_path / "stock" / "model.safetensors").stat().st_size
    assert f"float32, {size / 1e6:.1f} MB" in capsys.readouterr().out


def test_output_that_exists(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "model.gguf"
    target.write_text("mine")
    assert main(["export", str(folder), "-o", str(target), "--to", "gguf"]) == 2
    assert "exists" in capsys.readouterr().err
    assert target.read_text() == "mine"
