"""Families that are in no table: run as Llama where they compute what Llama does, refused in one line otherwise.

References: the stock model of the family, and that model with one thing changed.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tiny_models import LLAMA, logits, shake, tokens
from tolerances import assert_same_model
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.models import FAMILIES, load_model, save_model
from trisect.models.generic import recognise
from trisect.pipeline.run import compress


@pytest.fixture(autouse=True)
def table_as_it_was() -> Iterator[None]:
    known = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(known)


def saved(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    shake(model, seed=0)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("method", ["a3", "a3+"])
def test_an_unknown_family_that_computes_what_llama_does_is_compressed_saved_and_loaded(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """OLMo's norms have no weights, so that a3+ finds nothing to scale in the last one."""
    folder = saved(transformers.OlmoConfig(**LLAMA), tmp_path / "stock")
    with caplog.at_level(logging.WARNING):
        model = load_model(str(folder)).model
    assert "olmo is no known family" in caplog.text
    before = logits(model, tokens())
    config = CompressConfig(ratio=0.25, method=method, align=None)
    small = compress(model, config, tokens=tokens_from_tensor(tokens(6, 40))).model
    assert not logits(small, tokens()).equal(before)
    save_model(small, None, tmp_path / "small", receipt={})
    del FAMILIES["olmo"]
    assert_same_model(load_model(str(tmp_path / "small")).model, small, tokens())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.ArceeConfig(**LLAMA), r"there is no model.layers.0.mlp.gate_proj"),
        (transformers.OlmoConfig(**LLAMA, clip_qkv=0.5), "its layers compute something else"),
        (transformers.OlmoConfig(**LLAMA, clip_qkv=8.0), "its layers compute something else"),
        (transformers.MambaConfig(), "its config has no (intermediate_size|num_attention_heads)"),
        (transformers.BloomConfig(), "its config has no"),
    ],
)
def test_another_one_is_refused_by_what_differs(config: Any, reason: str) -> None:
    with pytest.raises(TrisectError, match=f"{config.model_type} is no known family.*{reason}.*docs/extend.md"):
        recognise(config.to_dict())
    assert config.model_type not in FAMILIES


def test_an_encoder_decoder_is_refused_as_one(tmp_path: Path) -> None:
    transformers.T5Config(vocab_size=97, d_model=16, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(TrisectError, match="encoder-decoder.*decoder-only"):
        load_model(str(tmp_path))
