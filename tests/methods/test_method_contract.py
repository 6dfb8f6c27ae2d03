"""Every method in the registry, one contract (design.md, section 5).

References: the dense model, parameter counts of the real modules, the plan's promise, a second run.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_models import tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.gather import calibrate
from trisect.methods import METHODS, get_method
from trisect.methods.method import Options, solve
from trisect.models import layer_views, load_model, save_model, shape_of
from trisect.parts import COMPONENTS
from trisect.pipeline import Compressed, compress
from trisect.plan import apply_plan, budget_of, plan_for

# MHA with RoPE, MHA without, and GQA with both kinds of layer.
MODELS = ("llama-mha", "gpt2", "smollm3")
MHA_ONLY = {"a3-ov-overall"}
CASES = [
    (method, model)
    for method in METHODS
    for model in MODELS
    if not (method in MHA_ONLY and model == "smollm3")
]
CALIBRATION = tokens(4, 40, seed=5)


def run(method: str, model: Any, *, ratio: float = 0.25, **settings: Any) -> Compressed:
    config = CompressConfig(ratio=ratio, method=method, align=None, **settings)
    return compress(model, config, tokens=tokens_from_tensor(CALIBRATION))


@pytest.mark.parametrize(("method", "name"), CASES)
def test_parameters_removed_are_what_the_plan_promised(method: str, name: str) -> None:
    model = tiny(name)
    before = shape_of(model)
    promised = budget_of(apply_plan(before, plan_for(before, CompressConfig(ratio=0.25, align=None))))
    run(method, model)
    counted = sum(module.weight.numel() for view in layer_views(model) for module in view.projections())
    # The stacked study solution has one rank for all heads: its promise is met to one rank.
    slack = 2 * before.layers[0].d_model * (before.layers[0].heads + 1) * len(before.layers)
    assert abs(counted - promised.linear_parameters) <= (slack if method in MHA_ONLY else 0)
    assert counted == budget_of(shape_of(model)).linear_parameters
    assert sum(p.numel() for p in model.parameters()) == budget_of(shape_of(model)).parameters


@pytest.mark.parametrize(("method", "name"), CASES)
def test_full_width_leaves_the_layer_untouched(method: str, name: str) -> None:
    for view in layer_views(tiny(name)):
        for component in COMPONENTS:
            part = view.part(component)
            solution = solve(METHODS[method], component, part, {}, width=part.width, options=Options())
            assert solution.part is part
            assert solution.loss == 0


@pytest.mark.parametrize(("method", "name"), CASES)
def test_predicted_loss_never_rises_with_width(method: str, name: str) -> None:
    losses = []
    for ratio in (0.75, 0.5, 0.25):
        result = run(method, tiny(name), ratio=ratio)
        # A method that repairs also pays for the layers before: only its first layer stands alone, up to the
        # strength its held-out tokens choose.
        alone = [e for e in result.losses if not METHODS[method].repairs or e["layer"] == 0]
        losses.append({(e["layer"], e["component"]): e["loss"] for e in alone})
    slack = 0.02 if METHODS[method].repairs else 1e-9
    for narrow, wide in zip(losses, losses[1:], strict=False):
        assert all(wide[key] <= narrow[key] * (1 + slack) + 1e-15 for key in wide)
    assert all(value > 0 for value in losses[0].values())


@pytest.mark.parametrize(("method", "name"), CASES)
def test_same_seed_same_bytes(method: str, name: str) -> None:
    first, second = run(method, tiny(name)).model, run(method, tiny(name)).model
    for (key, a), (_, b) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        assert a.equal(b), key


@pytest.mark.parametrize(("method", "name"), CASES)
def test_untouched_layers_and_components_stay_untouched(method: str, name: str) -> None:
    model = tiny(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    run(method, model, layers=(1,), parts=("ov", "mlp"))
    layers = model.get_submodule(layer_views(model)[0].family.layers)
    changed = {key for key, value in model.state_dict().items() if not same(before.get(key), value)}
    mine = {key for key in model.state_dict() if layers[1] is owner(model, key)}
    assert changed
    assert changed <= mine
    assert shape_of(model).layers[1].qk == shape_of(model).layers[0].qk


def same(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    return a is not None and a.shape == b.shape and a.equal(b)


def owner(model: Any, key: str) -> Any:
    """The decoder layer a parameter belongs to, or None."""
    path = layer_views(model)[0].family.layers + "."
    if not key.startswith(path):
        return None
    return model.get_submodule(path + key.removeprefix(path).split(".")[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("method", METHODS)
def test_dtype_is_preserved(method: str, dtype: torch.dtype) -> None:
    model = run(method, tiny("llama-mha", dtype=dtype)).model
    kinds = {tensor.dtype for tensor in model.state_dict().values()}
    assert kinds == {dtype, torch.int16}


@pytest.mark.parametrize(("method", "name"), CASES)
def test_save_and_load_round_trip(method: str, name: str, tmp_path: Path) -> None:
    model, ids = run(method, tiny(name)).model, tokens()
    save_model(model, None, tmp_path / "out", receipt=model.receipt)
    again = load_model(str(tmp_path / "out")).model
    with torch.no_grad():
        assert model(ids).logits.equal(again(ids).logits)
    assert shape_of(again) == shape_of(model)


@pytest.mark.parametrize(("method", "name"), [case for case in CASES if not METHODS[case[0]].repairs])
def test_stored_moments_give_the_same_model(method: str, name: str, tmp_path: Path) -> None:
    direct = run(method, tiny(name)).model
    model = tiny(name)
    config = CompressConfig(ratio=0.25, method=method, align=None)
    path = tmp_path / "moments.safetensors"
    calibrate(model, config, path, tokens=tokens_from_tensor(CALIBRATION))
    for ratio in (0.5, 0.25):
        cut = copy.deepcopy(model)
        compress(cut, CompressConfig(ratio=ratio, method=method, align=None), moments=path)
    for (key, a), (_, b) in zip(direct.state_dict().items(), cut.state_dict().items(), strict=True):
        assert a.equal(b), key


@pytest.mark.parametrize("method", METHODS)
def test_missing_statistics_name_the_command_that_collects_them(method: str) -> None:
    part = layer_views(tiny("gpt2"))[0].part("ov")
    with pytest.raises(TrisectError, match="trisect calibrate"):
        solve(METHODS[method], "ov", part, {}, width=4, options=Options())


def test_the_stacked_study_refuses_shared_value_heads() -> None:
    with pytest.raises(TrisectError, match=r"MHA.*--method a3"):
        run("a3-ov-overall", tiny("llama-gqa"))


def test_an_unknown_method_lists_near_names() -> None:
    with pytest.raises(TrisectError, match=r"Did you mean a3-xkv"):
        get_method("a3-xvk")


def test_a_compressed_model_can_be_compressed_again() -> None:
    model = tiny("llama-gqa")
    run("a3", model, ratio=0.25, parts=("qk", "mlp"))
    run("a3", model, ratio=0.34, parts=("qk", "ov"))
    ids = tokens()
    assert model.config.trisect["original"][0]["qk"] == 16
    assert shape_of(model).layers[0].qk == 8
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()
    index = layer_views(model)[0].attention.rotary_index
    assert index is not None
    assert index.max() < 8
    assert all(len(set(row)) == len(row) for row in index.tolist())
