"""The command line and Python, asked for the same, write the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import trisect
from command_line import read, run
from tiny_models import LLAMA, character_tokenizer, shake
from trisect.calibrate import texts

WEIGHTS = "model.safetensors"


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """Wide enough for the alignment that users get if they name none."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**LLAMA, "head_dim": 32, "intermediate_size": 256})
    model = transformers.AutoModelForCausalLM.from_config(config)
    shake(model, seed=0)
    model.save_pretrained(tmp_path / "wide")
    character_tokenizer().save_pretrained(tmp_path / "wide")
    return tmp_path / "wide"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return file


def both(model: Path, folder: Path, words: list[object], **settings: Any) -> tuple[bytes, bytes]:
    """Weights by the command line and by Python; their receipts say the same of the run."""
    typed, called = folder / "typed", folder / "called"
    assert run("compress", model, "-o", typed, *words, "--quiet") == 0
    trisect.save(trisect.compress(str(model), **settings), called)
    receipts = [read(out / "receipt.json") for out in (typed, called)]
    for key in ("recipe", "token_hash", "plan"):
        assert receipts[0][key] == receipts[1][key], key
    return (typed / WEIGHTS).read_bytes(), (called / WEIGHTS).read_bytes()


@pytest.mark.parametrize("evaluate", [[], ["--eval", "none"]])
def test_a_ratio_and_a_text_mean_the_same_weights(wide: Path, tmp_path: Path, text: Path, evaluate: list[str]) -> None:
    words = ["--ratio", 0.5, "--method", "a3", "--calibration", text, *evaluate]
    typed, called = both(wide, tmp_path, words, ratio=0.5, method="a3", calibration=str(text))
    assert typed == called


@pytest.mark.slow
def test_a_ratio_alone_means_the_same_weights(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MOST", 32)  # windows that are usual, for a model as small as this one
    typed, called = both(wide, tmp_path, ["--ratio", 0.5], ratio=0.5)
    assert typed == called


def test_a_bound_on_perplexity_means_the_same_weights(wide: Path, tmp_path: Path, text: Path) -> None:
    words = ["--max-ppl-increase", "200%", "--method", "a3", "--calibration", text]
    settings = {"max_ppl_increase": "200%", "method": "a3", "calibration": [str(text)]}
    typed, called = both(wide, tmp_path, words, **settings)
    assert typed == called


@pytest.mark.slow
def test_a_real_model_gets_the_same_weights(tmp_path: Path, assets: Path) -> None:
    model = assets / "models" / "stories15m"
    if not model.is_dir():
        pytest.skip(f"no {model}; set TRISECT_ASSETS to the folder that has models/stories15m")
    text = assets / "data" / "tinystories" / "tinystories.txt"
    words = ["--ratio", 0.25, "--method", "a3", "--samples", 8, "--length", 64, "--calibration", text]
    calibration = trisect.CalibrationConfig(source=str(text), samples=8, length=64)
    typed, called = both(model, tmp_path, words, ratio=0.25, method="a3", calibration=calibration)
    assert typed == called


def test_a_goal_beside_a_config_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    config = trisect.CompressConfig(ratio=0.5)
    for more in ({"ratio": 0.25}, {"method": "a3"}, {"max_ppl_increase": "5%"}):
        (name,) = more
        words = rf"{name} and config were given.*replace\(config, {name}="
        with pytest.raises(trisect.TrisectError, match=words):
            trisect.compress(str(tmp_path), config=config, **more)
