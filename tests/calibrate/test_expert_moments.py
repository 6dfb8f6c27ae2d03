"""Moments of experts on disk. Reference: the run that gathers them itself."""

from pathlib import Path

import pytest

from tiny_models import tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.pipeline.run import compress
from trisect.pipeline.statistics import calibrate

TOKENS = tokens_from_tensor(tokens(4, 40))


@pytest.mark.parametrize(
    "settings", [{"method": "a3", "drop_experts": True}, {"method": "reap", "parts": ("mlp",)}], ids=["a3", "reap"]
)
def test_stored_moments_of_experts_cut_as_fresh_ones_do(settings: dict, tmp_path: Path) -> None:
    config, file = CompressConfig(ratio=0.3, align=None, **settings), tmp_path / "m.safetensors"
    calibrate(tiny("qwen2_moe"), config, file, tokens=TOKENS)
    found = compress(tiny("qwen2_moe"), config, moments=file).model.state_dict()
    expected = compress(tiny("qwen2_moe"), config, tokens=TOKENS).model.state_dict()
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
