"""Loss curves are the losses of the real model, and measuring them leaves the model as it was."""

import copy
from pathlib import Path

import pytest
import torch

from tiny_models import tiny, tokens
from tolerances import rounding
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.methods import METHODS
from trisect.models import layer_views, shape_of
from trisect.pipeline.loss_curves import TEST_SHARE, measure_curves
from trisect.pipeline.run import compress
from trisect.plan import budget_of

CALIBRATION = tokens_from_tensor(tokens(16, 30, seed=5))


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gpt2", "phi3", "qwen2_moe"])
def test_measuring_leaves_the_model_untouched(name: str) -> None:
    model = tiny(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    measured = measure_curves(model, CALIBRATION, METHODS["a3+"])
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(after[key].equal(value) for key, value in before.items())
    assert set(measured.points) == {(v.index, p) for v in layer_views(model) for p in ("qk", "ov", "mlp")}
    assert all(curve[max(curve)] == 0 for curve in measured.points.values())


def test_a_point_of_a_curve_is_the_loss_of_the_model_with_that_component_narrowed() -> None:
    """In float64 but for the loss itself, whose softmax and sum are float32."""
    measured = measure_curves(tiny("gpt2").double(), CALIBRATION, METHODS["a3+"], parts=("mlp",))
    width = min(measured.points[0, "mlp"])
    model = tiny("gpt2").double()
    testing = CALIBRATION.ids[-len(CALIBRATION.ids) // TEST_SHARE :]
    solving = tokens_from_tensor(CALIBRATION.ids[: -len(testing)])
    with torch.no_grad():
        dense = model(testing, labels=testing).loss.item()
    ratio = 1 - width / shape_of(model).layers[0].mlp
    # A curve is measured before there is a whole narrow model whose last norm could be scaled.
    settings = {"parts": ("mlp",), "layers": (0,), "without": ("tail",)}
    config = CompressConfig(ratio=ratio, method="a3+", align=None, **settings)
    compress(model, config, tokens=solving)
    with torch.no_grad():
        narrow = model(testing, labels=testing).loss.item()
    apart = dense * rounding(torch.float32, steps=2)
    # A rise this far above the tolerance: half or twice of it would be seen below.
    assert abs(narrow - dense) > 50 * apart
    assert measured.points[0, "mlp"][width] == pytest.approx(narrow - dense, abs=apart)


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


def widened(changes: dict[str, int]) -> torch.nn.Module:
    import transformers

    config = copy.deepcopy(tiny("llama-gqa").config)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()
