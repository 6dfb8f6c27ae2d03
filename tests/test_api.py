"""The three calls most people need, with every kind of goal and of calibration they take."""

import copy
from pathlib import Path

import pytest
import torch
import transformers

import trisect
from tiny_models import LLAMA, shake, tiny, tokens
from trisect.curves import held_out
from trisect.data import tokens_from_tensor
from trisect.evaluate.perplexity import perplexity
from trisect.models import shape_of
from trisect.plan import budget_of


@pytest.fixture(scope="module")
def wide() -> torch.nn.Module:
    """Wide enough for the alignment that users get if they name none; cutting it costs perplexity."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**LLAMA, "head_dim": 32, "intermediate_size": 256})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    shake(model, seed=0)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    return model


@pytest.fixture(scope="module")
def ids(wide: torch.nn.Module) -> torch.Tensor:
    """The model's own writing: nothing predicts it better."""
    torch.manual_seed(1)
    return wide.generate(tokens(8, 2), do_sample=True, min_new_tokens=28, max_new_tokens=28)


def parameters(model: torch.nn.Module) -> int:
    return budget_of(shape_of(model)).parameters


def test_a_ratio_compresses_the_object_itself(wide: torch.nn.Module, ids: torch.Tensor) -> None:
    model = copy.deepcopy(wide)
    small = trisect.compress(model, 0.5, calibration=ids)
    assert small is model
    assert parameters(small) < parameters(wide)
    assert small.receipt["recipe"]["ratio"] == 0.5


@pytest.mark.parametrize("by", ["argument", "config"])
def test_a_bound_on_perplexity_gives_a_smaller_copy_inside_it(
    wide: torch.nn.Module, ids: torch.Tensor, by: str, tmp_path: Path
) -> None:
    before = {key: value.clone() for key, value in wide.state_dict().items()}
    if by == "argument":
        small = trisect.compress(wide, max_ppl_increase="20%", method="a3", calibration=ids)
    else:
        config = trisect.CompressConfig(max_ppl_increase="20%", method="a3", align=8)
        small = trisect.compress(wide, config=config, calibration=tokens_from_tensor(ids))
    assert all(value.equal(before[key]) for key, value in wide.state_dict().items())
    assert parameters(small) < parameters(wide)
    judging = tokens_from_tensor(held_out(ids)[1])
    assert perplexity(small, judging).perplexity <= 1.2 * perplexity(wide, judging).perplexity
    target = small.receipt["target"]
    assert target["held_out"]["hash"] == judging.hash
    assert {trial["inside"] for trial in target["trials"]} == {True, False}  # the bound was in the way
    again = trisect.load(trisect.save(small, tmp_path / "out"))
    with torch.no_grad():
        assert again(ids).logits.equal(small(ids).logits)


def test_the_goal_is_one_and_has_to_be_named() -> None:
    model, ids = tiny("gpt2"), tokens(8, 30)
    with pytest.raises(trisect.TrisectError, match=r"ratio=0.25.*max_ppl_increase='5%'"):
        trisect.compress(model)
    with pytest.raises(trisect.TrisectError, match="one goal"):
        trisect.compress(model, 0.5, max_ppl_increase="5%", calibration=ids)
    with pytest.raises(trisect.TrisectError, match="no widths to search over"):
        trisect.compress(model, max_ppl_increase="5%", method="svd", calibration=ids)
