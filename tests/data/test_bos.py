"""Models that babble without BOS get it in front of every window, whatever their tokenizer adds by itself."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_models import character_tokenizer, tiny
from trisect.api import perplexity
from trisect.calibrate.texts import held_out_texts, prepare
from trisect.config import CalibrationConfig, CompressConfig
from trisect.data import load_tokens
from trisect.models import load_model
from trisect.models.checkpoint import starting_texts

TEXT = "the quick brown fox jumps over the lazy dog " * 40
LENGTH = 16


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def tokenizer(name: str) -> Any:
    return starting_texts(character_tokenizer(bos_token="~"), tiny(name))


def test_only_families_that_need_it_start_with_bos(text: str) -> None:
    for name, starts in (("gemma3", True), ("gemma2", True), ("llama-gqa", False)):
        found, choice = tokenizer(name), {"samples": 4, "length": LENGTH, "sampling": "first"}
        windows = load_tokens(text, found, **choice)
        assert windows.ids.shape == (4, LENGTH)
        assert bool((windows.ids[:, 0] == found.bos_token_id).all()) == starts
        # Nothing of the text is lost between windows, and BOS is none of its bytes.
        own = windows.ids[:, 1:] if starts else windows.ids
        assert "".join(found.batch_decode(own.tolist())).replace(" ", "") == TEXT[: own.numel()].replace(" ", "")
        assert windows.text_bytes == sum(len(part) for part in found.batch_decode(own.tolist()))


@pytest.mark.parametrize("sampling", ["random", "first"])
def test_calibration_and_held_out_windows_start_with_it(text: str, sampling: str) -> None:
    found = tokenizer("gemma3")
    config = CalibrationConfig(source=text, samples=5, length=LENGTH, sampling=sampling)
    prepared = prepare(tiny("gemma3"), CompressConfig(ratio=0.5, calibration=config), found)
    held, _ = held_out_texts(prepared, found, count=3, other=False)
    for ids in (prepared.tokens.ids, held[0].ids):
        assert ids.shape[1] == LENGTH
        assert bool((ids[:, 0] == found.bos_token_id).all())
        assert not bool((ids[:, 1:] == found.bos_token_id).any())


def test_a_loaded_tokenizer_adds_it_and_perplexity_is_that_of_windows_behind_it(tmp_path: Path, text: str) -> None:
    model = tiny("gemma3-one-key")
    model.save_pretrained(tmp_path / "model")
    character_tokenizer(bos_token="~").save_pretrained(tmp_path / "model")
    loaded = load_model(str(tmp_path / "model"))
    assert loaded.tokenizer.starts_with_bos
    ids = loaded.tokenizer(TEXT, add_special_tokens=False)["input_ids"][: 2 * (LENGTH - 1)]
    windows = torch.tensor(ids).reshape(2, -1)
    windows = torch.cat([torch.full((2, 1), loaded.tokenizer.bos_token_id), windows], dim=1)
    found = perplexity(loaded.model, text, length=LENGTH, windows=2, tokenizer=loaded.tokenizer)
    assert found.perplexity == pytest.approx(perplexity(loaded.model, windows).perplexity)
    assert found.tokens == 2 * (LENGTH - 1)
