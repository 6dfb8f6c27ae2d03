"""The examples run as a reader would run them, and what they add to the tables passes the contracts.

References: the contracts' own test functions, and brute-force sums over tokens.
"""

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tiny_models
import trisect
from loading import module_at
from tolerances import assert_same_model
from trisect.methods.method import Options
from trisect.models import FAMILIES, layer_views, save_model
from trisect.models.compressed import CompressedModel
from trisect.records.parts import MLP

ROOT = Path(__file__).resolve().parents[2]
METHOD_CONTRACT = (
    "test_parameters_removed_are_what_the_plan_promised",
    "test_full_width_leaves_the_layer_untouched",
    "test_predicted_loss_never_rises_with_width",
    "test_same_seed_same_bytes",
    "test_untouched_layers_and_components_stay_untouched",
    "test_save_and_load_round_trip",
    "test_stored_moments_give_the_same_model",
)
FAMILY_CONTRACT = (
    "test_the_tiny_models_cover_every_family_in_the_table",
    "test_parts_read_and_written_back_are_identical",
    "test_owned_attention_equals_the_stock_one",
    "test_full_rank_solutions_mix_channels_but_keep_the_logits",
    "test_a_narrow_model_equals_the_stock_model_with_its_weights_scattered_back",
    "test_generation_with_the_narrow_cache_equals_generation_without",
    "test_gradients_reach_every_narrow_weight",
    "test_the_live_cache_is_as_small_as_the_budget_says",
)


def example(name: str) -> Any:
    return module_at(ROOT / "examples" / f"{name}.py")


SAID = {
    "add_a_method": ("a3 ", "norm-refit"),
    "add_a_family": ("logits are the stock model's", "decoder linear weights"),
    "three_steps": ("calibrated: 512 tokens, 3 layers", "% lost", "KV cache bytes per token"),
}
"""What an example prints, among other things."""


@pytest.mark.parametrize("name", [path.stem for path in sorted((ROOT / "examples").glob("*.py"))])
def test_an_example_runs_by_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(words in printed for words in SAID[name])


@pytest.mark.parametrize("name", ["add_a_method", "three_steps"])
def test_an_example_takes_a_checkpoint_and_a_text(
    name: str, checkpoint: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, str(checkpoint), str(text)])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out


def mlp_problem() -> tuple[MLP, torch.Tensor]:
    part = layer_views(tiny_models.tiny("llama-gqa"))[0].part("mlp")
    assert isinstance(part, MLP)
    mixing = torch.randn(part.width, part.width, generator=torch.Generator().manual_seed(2))
    x = torch.randn(200, part.width, generator=torch.Generator().manual_seed(3)).double() @ mixing.double()
    return part, x


def test_the_example_method_predicts_the_error_it_makes_and_the_refit_lowers_it() -> None:
    norm_refit = example("add_a_method")
    part, x = mlp_problem()
    solution = norm_refit.solve_mlp(part, {"down_gram": x.mT @ x / len(x)}, 40, Options())
    W = part.W_down.double()
    norms = [W_in.double().norm(dim=0) for W_in in (part.W_up, part.W_gate)]
    kept = (norms[0] * norms[1] * W.norm(dim=1)).topk(40).indices.sort().values
    torch.testing.assert_close(solution.part.W_up, part.W_up[:, kept], rtol=0, atol=0)

    def error(narrow: torch.Tensor) -> float:
        return (x @ W - x[:, kept] @ narrow).square().sum(dim=1).mean().item()

    assert solution.loss == pytest.approx(error(solution.part.W_down.double()), rel=1e-5)
    best = torch.linalg.lstsq(x[:, kept], x @ W).solution
    assert solution.loss == pytest.approx(error(best), rel=1e-3)
    assert solution.loss < 0.9 * error(W[kept])


@pytest.mark.parametrize("test", METHOD_CONTRACT)
def test_the_example_method_keeps_the_contract(test: str, tmp_path: Path) -> None:
    method = example("add_a_method").NORM_REFIT.name
    contract = module_at(ROOT / "tests" / "methods" / "test_method_contract.py")
    for model in ("llama-mha", "gpt2"):
        folder = [tmp_path / model] if "tmp_path" in getattr(contract, test).__code__.co_varnames else []
        for path in folder:
            path.mkdir()
        getattr(contract, test)(method, model, *folder)


@pytest.mark.parametrize("test", FAMILY_CONTRACT)
def test_the_example_family_keeps_the_contract(test: str) -> None:
    tiny_models.CONFIGS["arcee"] = example("add_a_family").tiny_config
    contract = module_at(ROOT / "tests" / "models" / "test_family_contract.py")
    function = getattr(contract, test)
    given = function.__code__.co_varnames[: function.__code__.co_argcount]
    for attention in ("eager", "sdpa") if "attention" in given else (None,):
        arguments = {"name": "arcee", "attention": attention}
        function(**{name: arguments[name] for name in given})


def test_a_registered_family_is_saved_with_its_record_for_those_without_trisect(tmp_path: Path) -> None:
    module = example("add_a_family")
    ids = tiny_models.tokens(4, 40)
    config = trisect.CompressConfig(ratio=0.25, method="a3", align=None)
    model = trisect.compress(module.tiny_model(), config=config, calibration=ids)
    save_model(model, None, tmp_path / "out", receipt=model.receipt)
    assert_same_model(trisect.load(tmp_path / "out"), model, ids)
    alone = module_at(tmp_path / "out" / "modeling_trisect.py").TrisectArceeForCausalLM
    assert issubclass(alone, transformers.ArceeForCausalLM)
    assert not issubclass(alone, CompressedModel)
    assert_same_model(alone.from_pretrained(tmp_path / "out"), model, ids)


def test_a_record_that_does_not_fit_is_noticed() -> None:
    module = example("add_a_family")
    FAMILIES["arcee"] = replace(FAMILIES["arcee"], rotary="adjacent")
    with pytest.raises(SystemExit, match="the record is wrong"):
        module.check(module.tiny_model(), tiny_models.tokens(2, 20))
