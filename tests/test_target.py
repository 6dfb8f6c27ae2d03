"""A bound on perplexity is kept on windows that took no part in solving; the model given is not touched."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tiny_models import tiny, tokens
from trisect.config import CalibrationConfig, CompressConfig
from trisect.curves import held_out
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.evaluate.perplexity import perplexity
from trisect.models import shape_of
from trisect.pipeline import compress
from trisect.plan import budget_of
from trisect.target import _windows_apart, compress_within

CALIBRATION = tokens_from_tensor(tokens(16, 30, seed=5))


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "a3", "max_ppl_increase": "30%"},
        {"method": "a3", "max_ppl_increase": 20.0, "budget": "kv"},
        {"method": "a3+", "max_ppl_increase": "30%", "allocate": "balanced", "parts": ("mlp", "ov")},
    ],
)
def test_the_result_is_inside_on_the_held_out_windows(settings: dict[str, object]) -> None:
    model = tiny("llama-gqa")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    config = CompressConfig(align=None, **settings)  # type: ignore[arg-type]
    result = compress_within(model, config, tokens=CALIBRATION, tries=4)
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())
    judging = tokens_from_tensor(held_out(CALIBRATION.ids)[1])
    dense, now = perplexity(model, judging), perplexity(result.model, judging)
    if settings["max_ppl_increase"] == "30%":
        assert now.perplexity <= 1.3 * dense.perplexity
    else:
        assert now.perplexity <= 20 + dense.perplexity
    target = result.receipt["target"]
    last = [trial for trial in target["trials"] if trial["inside"]][-1]
    assert now.nll - dense.nll == pytest.approx(last["rise"], abs=1e-6)
    assert len(target["trials"]) <= 4
    assert budget_of(shape_of(result.model)).parameters < budget_of(shape_of(model)).parameters
    assert target["held_out"]["hash"] == judging.hash
    assert result.receipt["recipe"]["max_ppl_increase"] == settings["max_ppl_increase"]


def test_the_method_decides_how_widths_are_spread_unless_told() -> None:
    result = compress(tiny("llama-gqa"), CompressConfig(ratio=0.5, align=None), tokens=CALIBRATION)
    assert result.receipt["recipe"]["allocate"] == "uniform"


def test_other_goals_go_through_the_pipeline() -> None:
    model = tiny("llama-gqa")
    full = budget_of(shape_of(model))
    result = compress(model, CompressConfig(kv_ratio=0.25, align=None), tokens=CALIBRATION)
    now = budget_of(shape_of(result.model))
    assert now.kv_bytes_per_token == 0.75 * full.kv_bytes_per_token
    assert now.components["mlp"] == full.components["mlp"]
    entry = result.model.config.trisect
    assert entry["ratio"] == pytest.approx(1 - now.linear_parameters / full.linear_parameters)


def test_random_windows_held_out_share_no_text_with_the_others(tmp_path: Path) -> None:
    # Every token has its position as its name, so that shared text would show.
    save_file({"input_ids": torch.arange(1000)}, tmp_path / "ids.safetensors")
    for sampling in ("random", "first"):
        calibration = CalibrationConfig(
            source=str(tmp_path / "ids.safetensors"), samples=16, length=50, sampling=sampling
        )
        config = CompressConfig(max_ppl_increase="5%", calibration=calibration)
        solving, judging = held_out(_windows_apart(config, tokenizer=None).ids)
        assert (len(solving), len(judging)) == (12, 4)
        assert not set(solving.flatten().tolist()) & set(judging.flatten().tolist())


def test_what_cannot_be_bounded_is_refused() -> None:
    model = tiny("gpt2")
    with pytest.raises(TrisectError, match="max_ppl_increase"):
        compress_within(model, CompressConfig(ratio=0.5), tokens=CALIBRATION)
    bound = CompressConfig(max_ppl_increase="5%", align=None, allocate="balanced")
    with pytest.raises(TrisectError, match="--samples 8"):
        compress_within(model, bound, tokens=tokens_from_tensor(tokens(1, 30)))
    with pytest.raises(TrisectError, match="compress_within"):
        compress(model, bound, tokens=CALIBRATION)
