"""The Python interface: three calls with every kind of goal, and the same flow one step at a time."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.utils import logging

import trisect
from tiny_models import LLAMA, save_tiny, shake, tiny, tokens
from tolerances import assert_same_model
from trisect import api
from trisect.data import tokens_from_tensor
from trisect.evaluate.perplexity import perplexity
from trisect.models import shape_of
from trisect.pipeline.loss_curves import held_out
from trisect.plan import budget_of
from trisect.report.terminal import count


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
    testing = tokens_from_tensor(held_out(ids)[1])
    assert perplexity(small, testing).perplexity <= 1.2 * perplexity(wide, testing).perplexity
    target = small.receipt["target"]
    assert target["held_out"]["hash"] == testing.hash
    assert {trial["inside"] for trial in target["trials"]} == {True, False}  # the bound was in the way
    assert_same_model(trisect.load(trisect.save(small, tmp_path / "out")), small, ids)


def test_the_goal_is_one_and_has_to_be_named() -> None:
    model, ids = tiny("gpt2"), tokens(8, 30)
    with pytest.raises(trisect.TrisectError, match=r"ratio=0.25.*max_ppl_increase='5%'"):
        trisect.compress(model)
    with pytest.raises(trisect.TrisectError, match="one goal"):
        trisect.compress(model, 0.5, max_ppl_increase="5%", calibration=ids)
    with pytest.raises(trisect.TrisectError, match="no widths to search over"):
        trisect.compress(model, max_ppl_increase="5%", method="svd", calibration=ids)


def config_for(method: str, **settings: Any) -> trisect.CompressConfig:
    return trisect.CompressConfig(**{"ratio": 0.25, "method": method, "align": None, **settings})


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(mine[key].equal(theirs[key]) for key in mine)


@pytest.mark.parametrize("method", ["a3", "a3+", "svd-llm", "svd-llm-sequential"])
def test_solving_and_rewriting_make_the_model_that_compress_makes(method: str) -> None:
    ids, config = tokens(6, 30), config_for(method)
    whole = trisect.compress(tiny("llama-gqa"), config=config, calibration=ids)
    model = tiny("llama-gqa")
    plan = api.plan(model, config, tokens=ids)
    result = api.rewrite(model, config, plan, api.solve(model, config, plan, tokens=ids))
    assert result.model is model
    assert same_weights(model, whole)
    for key in ("recipe", "plan", "losses", "token_hash"):
        assert model.receipt[key] == whole.receipt[key], key


def test_steps_from_stored_moments_wait_in_a_list_and_change_nothing_until_rewritten(tmp_path: Path) -> None:
    ids, config, model = tokens(6, 30), config_for("a3"), tiny("llama-gqa")
    before = copy.deepcopy(model)
    info = api.calibrate(model, config, tmp_path / "moments.safetensors", tokens=ids)
    assert (info.num_layers, info.num_tokens) == (3, 180)
    plan = api.plan(model, config)
    steps = list(api.solve(model, config, plan, moments=tmp_path / "moments.safetensors"))
    assert [(step.layer, step.component) for step in steps] == [
        (layer, part) for layer in range(3) for part in ("qk", "ov", "mlp")
    ]
    assert all(0 < step.solution.loss < step.solution.total for step in steps)
    assert same_weights(model, before)
    result = api.rewrite(model, config, plan, steps)
    assert same_weights(model, trisect.compress(before, config=config, calibration=ids))
    folder = trisect.save(result.model, tmp_path / "out")
    assert_same_model(trisect.load(folder), model, ids)


def test_steps_that_build_on_each_other_cannot_be_hoarded() -> None:
    ids, config, model = tokens(6, 30), config_for("a3+"), tiny("llama-gqa")
    plan = api.plan(model, config)
    with pytest.raises(trisect.TrisectError, match=r"apply every step before you take the next.*rewrite"):
        list(api.solve(model, config, plan, tokens=ids))
    with pytest.raises(trisect.TrisectError, match="no stored moments can hold"):
        api.solve(model, config, plan, moments="moments.safetensors")


def test_rewrite_refuses_steps_of_another_model_and_steps_already_in() -> None:
    ids, config, model = tokens(6, 30), config_for("a3", parts=("mlp",)), tiny("gpt2")
    plan = api.plan(model, config)
    steps = list(api.solve(model, config, plan, tokens=ids))
    with pytest.raises(trisect.TrisectError, match="another model object"):
        api.rewrite(copy.deepcopy(model), config, plan, steps)
    steps[0].apply()
    with pytest.raises(trisect.TrisectError, match="applies steps itself"):
        api.rewrite(model, config, plan, steps)


@pytest.mark.parametrize("method", ["a3", "a3+"])
def test_progress_is_told_in_order_and_to_the_end(method: str) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    trisect.compress(
        tiny("gpt2"),
        config=config_for(method),
        calibration=tokens(6, 30),
        progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total)),
    )
    assert seen
    for told in seen.values():
        assert told == sorted(told)
        assert told[-1][0] == told[-1][1]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny")


def test_a_folder_brings_its_tokenizer_and_the_result_keeps_it(checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a small text that is long enough " * 20, encoding="utf-8")
    calibration = trisect.CalibrationConfig(source=str(text), samples=4, length=30)
    model = trisect.compress(checkpoint, config=config_for("a3"), calibration=calibration)
    again = trisect.load(trisect.save(model, tmp_path / "out"))
    assert again.tokenizer("a small text").input_ids == model.tokenizer("a small text").input_ids


def test_nothing_is_printed_and_no_setting_is_left_changed(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def settings() -> tuple[Any, ...]:
        bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
        numbers = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
        return bars, level, *numbers, torch.get_rng_state().tolist()

    logging.set_verbosity_warning()
    before = settings()
    capfd.readouterr()
    for method in ("a3", "a3+"):
        model = trisect.compress(str(checkpoint), config=config_for(method), calibration=tokens(6, 30))
        trisect.load(trisect.save(model, tmp_path / method))
        api.perplexity(model, tokens(2, 30))
        api.summary(model)
    assert capfd.readouterr() == ("", "")
    assert settings() == before


def test_a_summary_counts_what_is_there() -> None:
    dense = tiny("llama-gqa")
    assert api.summary(dense).change.parameters == 0
    assert api.summary(dense).method is None
    small = trisect.compress(copy.deepcopy(dense), config=config_for("a3"), calibration=tokens(6, 30))
    summary = api.summary(small)
    assert summary.before.parameters == sum(p.numel() for p in dense.parameters())
    assert summary.after.parameters == sum(p.numel() for p in small.parameters())
    sizes = " ".join(str(summary).split())
    assert f"whole model │ {count(summary.before.parameters)} │ {count(summary.after.parameters)}" in sizes
    assert f"{summary.change.kv_bytes_per_token:.1%}" in sizes
    assert "method a3" in sizes
    assert repr(summary) == str(summary)


def test_perplexity_is_the_mean_loss_of_the_stock_model_exponentiated() -> None:
    model, ids = tiny("gpt2"), tokens(3, 20)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    measured = api.perplexity(model, ids)
    assert measured.perplexity == pytest.approx(loss.exp().item(), rel=1e-5)
    assert measured.tokens == 3 * 19


def test_names_that_are_taken_are_refused() -> None:
    from trisect.methods import METHODS, register_method
    from trisect.models import FAMILIES, Family, register_family

    with pytest.raises(trisect.TrisectError, match="a method 'a3' already"):
        register_method(replace(METHODS["a3"], summary="another"))
    with pytest.raises(trisect.TrisectError, match="a family 'llama' already"):
        register_family(replace(FAMILIES["llama"], o="dense"))
    with pytest.raises(trisect.TrisectError, match="a family 'mistral3' already"):
        register_family(replace(FAMILIES["llama"], name="mistral3"))
    assert register_method(METHODS["a3"]) is METHODS["a3"]  # as when a notebook's cell is run again
    with pytest.raises(trisect.TrisectError, match="no 'NoSuchForCausalLM'"):
        register_family(Family(name="nosuch", model="NoSuchForCausalLM"))
    assert "nosuch" not in FAMILIES
