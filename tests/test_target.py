"""A bound on perplexity is kept on windows that took no part in solving; the model given is not touched."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tiny_models import tiny, tokens
from trisect.calibrate.texts import prepare
from trisect.config import CalibrationConfig, CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.evaluate.perplexity import perplexity
from trisect.models import shape_of
from trisect.pipeline.loss_curves import held_out
from trisect.pipeline.run import compress, compress_within
from trisect.plan import budget_of

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
    testing = tokens_from_tensor(held_out(CALIBRATION.ids)[1])
    dense, now = perplexity(model, testing), perplexity(result.model, testing)
    if settings["max_ppl_increase"] == "30%":
        assert now.perplexity <= 1.3 * dense.perplexity
    else:
        assert now.perplexity <= 20 + dense.perplexity
    target = result.receipt["target"]
    last = [trial for trial in target["trials"] if trial["inside"]][-1]
    assert now.nll - dense.nll == pytest.approx(last["rise"], abs=1e-6)
    assert len(target["trials"]) <= 4
    assert budget_of(shape_of(result.model)).parameters < budget_of(shape_of(model)).parameters
    assert target["held_out"]["hash"] == testing.hash
    assert result.receipt["recipe"]["max_ppl_increase"] == str(settings["max_ppl_increase"])


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


@pytest.mark.parametrize("sampling", ["random", "first"])
@pytest.mark.parametrize("texts", [1, 3])
def test_windows_that_keep_a_bound_share_no_token_with_those_solved_on(
    tmp_path: Path, sampling: str, texts: int
) -> None:
    # Every token has its position as its name, so that shared text would show.
    names = []
    for number in range(texts):
        names.append(str(tmp_path / f"{number}.safetensors"))
        save_file({"input_ids": torch.arange(1000) + 1000 * number}, names[-1])
    calibration = CalibrationConfig(source=names, samples=16, length=50, sampling=sampling)
    config = CompressConfig(max_ppl_increase="5%", calibration=calibration)
    prepared = prepare(tiny("llama-gqa"), config, None)
    solving, testing = held_out(prepared.tokens.ids)
    assert (len(solving), len(testing)) == (12, 4)
    assert not set(solving.flatten().tolist()) & set(testing.flatten().tolist())
    for text in prepared.texts:
        kept = set(text.split.held_out(8, length=50).flatten().tolist())
        assert kept
        assert not kept & set(prepared.tokens.ids.flatten().tolist())


def test_what_cannot_be_bounded_is_refused() -> None:
    model = tiny("gpt2")
    with pytest.raises(TrisectError, match="max_ppl_increase"):
        compress_within(model, CompressConfig(ratio=0.5), tokens=CALIBRATION)
    bound = CompressConfig(max_ppl_increase="5%", align=None, allocate="balanced")
    with pytest.raises(TrisectError, match="--samples 8"):
        compress_within(model, bound, tokens=tokens_from_tensor(tokens(1, 30)))
    with pytest.raises(TrisectError, match="compress_within"):
        compress(model, bound, tokens=CALIBRATION)
