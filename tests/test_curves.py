"""Loss curves are the KL of the narrowed model to second order, and measuring them leaves the model as it was."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiny_models import tiny, tokens
from trisect.calibrate.fisher import DrawnAnswers
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.methods import METHODS
from trisect.models import layer_views, shape_of
from trisect.pipeline.loss_curves import LEFT_OUT, held_out, measure_curves
from trisect.pipeline.run import compress
from trisect.plan import budget_of
from trisect.records.parts import Experts, Part

CALIBRATION = tokens_from_tensor(tokens(16, 30, seed=5))


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gpt2", "phi3", "qwen2_moe"])
def test_measuring_leaves_the_model_untouched(name: str) -> None:
    model = tiny(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    measured = measure_curves(model, CALIBRATION, METHODS["a3+"], CompressConfig(ratio=0.3))
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(after[key].equal(value) for key, value in before.items())
    assert set(measured.points) == {(v.index, p) for v in layer_views(model) for p in ("qk", "ov", "mlp")}
    assert all(curve[max(curve)] == 0 for curve in measured.points.values())


@torch.no_grad()
def true_kl(dense: torch.nn.Module, changed: torch.nn.Module, ids: torch.Tensor) -> float:
    """KL(dense || changed) in nats per token."""
    p, q = (model(ids).logits.double().log_softmax(dim=-1) for model in (dense, changed))
    return (p.exp() * (p - q)).sum(dim=-1).mean().item()


@pytest.mark.parametrize(
    "name", ["llama-gqa", "gpt2", "gemma2", "falcon", "mpt", "opt", "qwen2_moe", "granite", "lfm2"]
)
def test_the_rise_of_a_small_change_is_the_true_kl(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as long as the windows leave no product out; 12 x 300 sums then know their mean square to 3%."""
    monkeypatch.setattr("trisect.calibrate.fisher.BLOCK", 20)
    dense, model, ids = tiny(name), tiny(name), tokens(12, 20)
    answers = DrawnAnswers(model, layer_views(model, own=True), ids, draws=300, batch_size=5, seed=0)
    with torch.no_grad():
        assert answers.loss == pytest.approx(dense(ids, labels=ids).loss.item(), rel=1e-5)
    for view in layer_views(model, own=True):
        answers.begin(view)
        assert answers.rise(view) == 0
        last = view.index + 1 == len(model.model.layers) if name == "qwen2_moe" else None
        # Where a router behind the change takes other experts, no derivative says so.
        for part in view.components if last is None else ["mlp"] * last:
            with view.trial():
                view.write(noisy(view.part(part)))
                assert answers.rise(view) == pytest.approx(true_kl(dense, model, ids), rel=0.15)
        answers.finish(view)


def noisy(part: Part) -> Part:
    """The part with every weight off by a little."""
    if isinstance(part, Experts):
        return replace(part, routed=tuple(noisy(expert) for expert in part.routed))
    generator = torch.Generator().manual_seed(0)
    off = {
        name: getattr(part, name) * (1 + 0.02 * torch.randn(getattr(part, name).shape, generator=generator))
        for name in vars(part)
        if name.startswith("W_") and getattr(part, name) is not None
    }
    return replace(part, **off)


def test_a_point_of_a_curve_is_the_kl_of_the_model_with_that_component_narrowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trisect.pipeline.loss_curves.DRAWS", 100)
    monkeypatch.setattr("trisect.calibrate.fisher.BLOCK", 30)
    measured = measure_curves(tiny("gpt2"), CALIBRATION, METHODS["a3+"], CompressConfig(ratio=0.3, parts=("ov", "mlp")))
    solving, testing = held_out(CALIBRATION.ids)
    for (layer, part), curve in measured.points.items():
        width = sorted(curve)[-2]  # the widest but one: the second order is enough there
        model = tiny("gpt2")
        full = shape_of(model).layers[layer].width(part)
        # A curve is measured before there is a whole narrow model whose last norm could be scaled.
        config = CompressConfig(
            ratio=1 - width / full,
            method="a3+",
            align=None,
            parts=(part,),
            layers=(layer,),
            without=("tail", *LEFT_OUT),
        )
        compress(model, config, tokens=tokens_from_tensor(solving))
        assert curve[width] == pytest.approx(true_kl(tiny("gpt2"), model, testing), rel=0.3)


def test_a_balanced_run_removes_no_more_than_asked_and_reuses_its_curves(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    config = CompressConfig(ratio=0.3, method="a3+", align=8, allocate="balanced")
    wide = {"hidden_size": 48, "intermediate_size": 256}
    models = [widened(wide) for _ in range(2)]
    full = budget_of(shape_of(models[0])).linear_parameters
    for model in models:
        compress(model, config, tokens=CALIBRATION, curves=path)
        assert 0.7 * full <= budget_of(shape_of(model)).linear_parameters < 0.8 * full
        assert path.exists()
    assert shape_of(models[0]) == shape_of(models[1])


def test_a_balanced_plan_does_not_count_on_what_the_method_leaves_whole() -> None:
    """Behind its norms QK can be left whole; then the other components have to give all."""
    model = tiny("qwen3")
    before = budget_of(shape_of(model)).linear_parameters
    config = CompressConfig(method="a3", ratio=0.2, allocate="balanced", align=None, qk_norm_tolerance=1e-9)
    found = compress(model, config, tokens=CALIBRATION)
    assert all(now.qk == tiny("qwen3").config.head_dim for now in shape_of(found.model).layers)
    removed = 1 - budget_of(shape_of(found.model)).linear_parameters / before
    assert removed == pytest.approx(0.2, abs=0.02)  # the grid's step


def widened(changes: dict[str, int]) -> torch.nn.Module:
    import transformers

    config = copy.deepcopy(tiny("llama-gqa").config)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()
