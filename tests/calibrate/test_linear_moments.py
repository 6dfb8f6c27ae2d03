"""Moments for methods on single linear maps. References: plain hooks and autograd on the stock model."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tiny_models import tiny, tokens
from tolerances import assert_same_but_for_rounding, steps_of
from trisect.calibrate import collect, fisher_information
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.methods import METHODS
from trisect.methods.method import Options, solve
from trisect.models import layer_views
from trisect.pipeline.rank_search import linear_plan
from trisect.pipeline.run import Run
from trisect.pipeline.statistics import statistics_for

IDS = tokens(3, 20, seed=4)
# Where each family's stock modules take the inputs x, a, up and down of a layer's linear maps.
INPUTS = {
    "llama-gqa": ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"),
    "phi3": ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    "gpt2": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
}


def heard(model: nn.Module, layer: nn.Module, path: str) -> Tensor:
    """Every input of a module while the model reads IDS: (tokens, width)."""
    inputs: list[Tensor] = []
    module = layer.get_submodule(path)
    handle = module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        model(input_ids=IDS)
    handle.remove()
    return torch.cat(inputs).double()


@pytest.mark.parametrize("name", INPUTS)
def test_input_moments_are_those_of_what_the_stock_modules_are_given(name: str) -> None:
    stock = tiny(name)
    owned = copy.deepcopy(stock)
    assert_same = partial(assert_same_but_for_rounding, steps=steps_of(stock), dtype=torch.float32)
    names = frozenset(f"{tap}_{kind}" for tap in ("x", "a", "up", "down") for kind in ("gram", "abs", "energy"))
    layers = stock.get_submodule(layer_views(owned)[0].family.layers)
    for view, found in collect(owned, IDS, lambda layer: names):
        for tap, path in zip(("x", "a", "up", "down"), INPUTS[name], strict=True):
            x = heard(stock, layers[view.index], path)
            assert_same(found[f"{tap}_gram"], x.mT @ x / len(x))
            assert_same(found[f"{tap}_abs"], x.abs().mean(dim=0))
            assert_same(found[f"{tap}_energy"], x.square().mean(dim=0))


def test_fisher_information_is_the_mean_squared_gradient_of_each_window() -> None:
    stock = tiny("llama-gqa")
    owned = copy.deepcopy(stock)
    found = fisher_information(owned, layer_views(owned), IDS)
    paths = {"q": "self_attn.q_proj", "v": "self_attn.v_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    wanted: dict[tuple[int, str], Tensor] = {}
    for window in IDS:
        stock.zero_grad()
        logits = stock(input_ids=window.unsqueeze(0)).logits[0]
        nn.functional.cross_entropy(logits[:-1], window[1:]).backward()
        for index, layer in enumerate(stock.model.layers):
            for name, path in paths.items():
                gradient: Any = layer.get_submodule(path).weight.grad  # (out, in)
                squares = gradient.double().square().sum(dim=0) / len(IDS)
                wanted[index, name] = wanted.get((index, name), torch.zeros(())) + squares
    for (index, name), value in wanted.items():
        torch.testing.assert_close(found[index][f"{name}_fisher"], value, rtol=1e-4, atol=1e-12)
    assert all(p.grad is None and p.requires_grad for p in owned.parameters())


def test_sequential_moments_follow_the_layers_cut_so_far() -> None:
    model, method, text = tiny("llama-gqa"), METHODS["svd-llm-sequential"], tokens_from_tensor(IDS)
    dense = copy.deepcopy(model)
    assert_same = partial(assert_same_but_for_rounding, steps=steps_of(model), dtype=torch.float32)
    config = CompressConfig(ratio=0.5, method=method.name, align=None)
    plan = linear_plan(model, config, text)
    run = Run(model=model, config=config, tokens=text, plan=plan)
    gathered = statistics_for(run)
    for view in gathered.layers():
        names, found = run.components(view.index), gathered.current
        whole = heard(dense, dense.model.layers[view.index], "self_attn.q_proj")
        cut = heard(model, view.layer, "self_attn.q_proj")
        assert_same(found["x_gram"], whole.mT @ whole / len(whole))
        assert_same(found["narrow_x_gram"], cut.mT @ cut / len(cut))
        assert torch.allclose(found["x_gram"], found["narrow_x_gram"]) == (view.index == 0)
        for name in names:
            width = plan.width(view.index, name)
            view.apply(solve(method, name, view.part(name), found, width=width, options=Options()))
        gathered.finish(view)
