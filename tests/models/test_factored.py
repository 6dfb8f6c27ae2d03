"""Factored and masked linear maps in every family: real modules, the same function, all of it countable.

References: the same model with the product of the factors in its dense weights; weights and gradients read
from stock parameters by hand; parameters counted one by one.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from factoring import apply, factors, mixed, product
from torch import Tensor, nn

from tiny_models import STORED, logits, tiny, tokens
from trisect.errors import TrisectError
from trisect.models import LayerView, layer_views, shape_of, zeros_of
from trisect.models.linear import FactoredLinear, GroupedLinear
from trisect.plan import budget_of
from trisect.plan.budget import PREFILL_LENGTH
from trisect.records.parts import COMPONENTS, LINEARS, Masked, Shrunk
from trisect.records.shapes import LinearShape

SAME = {"rtol": 1e-9, "atol": 1e-9}


def stored(view: LayerView, name: str) -> Tensor:
    """The columns of a stock parameter that hold a map, (in, heads or 1, width), in its own memory."""
    a, f, heads = view.attention_module, view.family, view.heads
    if name in ("gate", "up", "down"):
        module = view.layer.get_submodule(getattr(f, name))
        W = module.weight if type(module).__name__ == "Conv1D" else module.weight.T
        if f.gate == f.up and name != "down":
            half = W.shape[1] // 2
            W = W[:, :half] if name == "gate" else W[:, half:]
        return W.unflatten(1, (1, -1))
    if name == "o" or len(f.qkv) == 3:
        module = getattr(a, f.o if name == "o" else f.qkv["qkv".index(name)])
        W = module.weight if type(module).__name__ == "Conv1D" else module.weight.T
        return W.unflatten(1, (1, -1))
    module = getattr(a, f.qkv[0])
    W = module.weight if type(module).__name__ == "Conv1D" else module.weight.T
    number, width = "qkv".index(name), heads.qk
    if f.per_head:
        each, group = W.unflatten(1, (heads.kv_heads, -1)), heads.heads // heads.kv_heads
        return each.split([group * width, width, width], dim=2)[number]
    sizes = [heads.heads * width, heads.kv_heads * width, heads.kv_heads * width]
    return W.split(sizes, dim=1)[number].unflatten(1, (1, -1))


@pytest.mark.parametrize("name", STORED)
def test_maps_have_the_same_names_in_every_family_and_are_what_is_stored(name: str) -> None:
    for view in layer_views(tiny(name)):
        names = [n for component in COMPONENTS for n in LINEARS[component]]
        assert set(view.linears()) == set(names) - ({"gate"} if view.family.gate is None else set())
        shape = view.shape()
        for linear in view.linears():
            part = view.part(linear)
            assert part == replace(view.linear(linear), W=part.W, b=part.b)
            assert part.W.equal(stored(view, linear).detach().flatten(1))
            heads = {"q": shape.heads, "o": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
            assert part.heads == heads.get(linear, 1)
            assert part.b is None or part.b.shape == part.W.shape[1:]


@pytest.mark.parametrize("name", STORED)
def test_exact_factors_of_every_map_keep_the_logits(name: str) -> None:
    model, ids = tiny(name).double(), tokens()
    views = layer_views(model, own=True)  # some stock rotations compute in float32 whatever they are given
    before = logits(model, ids)
    for view in views:
        for number, linear in enumerate(view.linears()):
            groups = 1 + (view.index + number) % 2
            view.apply(factors(view.linear(linear), groups=groups))
        assert {entry.name for entry in view.shape().linears} == set(view.linears())
    torch.testing.assert_close(logits(model, ids), before, **SAME)


@pytest.mark.parametrize("name", STORED)
def test_each_map_factored_alone_is_its_product_in_the_stock_weights(name: str) -> None:
    ids = tokens()
    for linear in layer_views(tiny(name))[0].linears():
        stock, model = tiny(name).double(), tiny(name).double()
        for view, dense in zip(layer_views(model), layer_views(stock, own=True), strict=True):
            solution = factors(view.linear(linear), rank=3, groups=1 + view.index % 2)
            view.apply(solution)
            with torch.no_grad():
                place = stored(dense, linear)
                place.copy_(product(solution).view_as(place))
        torch.testing.assert_close(logits(model, ids), logits(stock, ids), **SAME)


@pytest.mark.parametrize("name", STORED)
def test_dense_maps_beside_a_factored_one_are_read_and_written_as_before(name: str) -> None:
    model, stock = tiny(name).double(), tiny(name).double()
    for view, dense in zip(layer_views(model), layer_views(stock), strict=True):
        for linear in ("v", "up"):
            view.apply(factors(view.linear(linear)))
        for linear in set(view.linears()) - {"v", "up"}:
            assert view.linear(linear).W.equal(dense.linear(linear).W)
            for each in (view, dense):
                part = each.linear(linear)
                b = None if part.b is None else part.b + 0.1
                each.apply(Shrunk(part=replace(part, W=1.1 * part.W, b=b), loss=0.0, total=1.0))
        for each in (view, dense):
            part = each.part("qk")
            each.write(replace(part, W_q=0.9 * part.W_q, W_k=0.8 * part.W_k))
    torch.testing.assert_close(logits(model, tokens()), logits(stock, tokens()), **SAME)


@pytest.mark.parametrize("name", STORED)
def test_gradients_are_those_of_unfused_maps(name: str) -> None:
    """W = W I = I W: the gradient of the factor that holds W is the gradient of W."""
    ids = tokens()
    model = tiny(name).double()
    views = layer_views(model, own=True)
    assert views[0].gradient("q") is None
    model(ids, labels=ids).loss.backward()
    for linear in views[1].linears():
        reference = tiny(name).double()
        view = layer_views(reference, own=True)[1]
        part = view.linear(linear)
        tall = part.W.shape[0] >= part.W.shape[1]
        A, B = (part.W, torch.eye(part.width)) if tall else (torch.eye(part.width), part.W)
        view.apply(replace(factors(part), A=A.double(), B=B.double().unsqueeze(0)))
        reference(ids, labels=ids).loss.backward()
        module: Any = view.module(linear)
        expected = (module.narrow if tall else module.wide).weight.grad.T
        found = views[1].gradient(linear)
        assert found is not None
        torch.testing.assert_close(found, expected, **SAME)


@pytest.mark.parametrize("name", STORED)
def test_gradients_reach_every_factor(name: str) -> None:
    model, ids = mixed(name), tokens()
    model.train()
    model(ids, labels=ids).loss.backward()
    for view in layer_views(model):
        for module in view.projections():
            assert module.weight.grad.abs().sum() > 0, type(module).__name__


@pytest.mark.parametrize("name", STORED)
def test_the_budget_is_what_the_modules_hold(name: str) -> None:
    model = mixed(name)
    shape = shape_of(model)
    assert shape.layers[0].linears[0] == LinearShape(name="k", rank=5, groups=shape.layers[0].kv_heads, cached=True)
    budget = budget_of(shape)
    held = [module.weight.numel() for view in layer_views(model) for module in view.projections()]
    assert budget.linear_parameters == sum(held)
    assert budget.parameters == sum(p.numel() for p in model.parameters())
    assert shape.other_parameters == shape_of(tiny(name)).other_parameters
    dense = budget_of(shape_of(tiny(name)))
    assert dense.flops - budget.flops == 2 * PREFILL_LENGTH * (dense.linear_parameters - budget.linear_parameters)


@pytest.mark.parametrize("name", STORED)
def test_a_trial_of_factors_and_masks_leaves_no_trace(name: str) -> None:
    model, ids = tiny(name), tokens()
    views = layer_views(model)
    apply(views[1], v=3, up=4)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modules, output = list(model.modules()), logits(model, ids)
    kinds = [type(module) for module in modules]
    for view in views:
        with view.trial():
            for linear in set(view.linears()) - {"v", "up"}:
                view.apply(factors(view.linear(linear), rank=2, cached=linear == "k"))
            if view.index == 0:
                view.apply(Masked(name="v", W=torch.zeros_like(view.linear("v").W), loss=0.0, total=0.0))
            assert not logits(model, ids).equal(output)
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert [type(module) for module in modules] == kinds
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(after[key].equal(value) for key, value in before.items())
    assert logits(model, ids).equal(output)


@pytest.mark.parametrize("name", STORED)
def test_masks_put_their_zeros_into_the_stored_weights(name: str) -> None:
    model, ids = tiny(name), tokens()
    stock = copy.deepcopy(model)
    assert zeros_of(model) == 0
    zeros = 0
    for view, dense in zip(layer_views(model), layer_views(stock, own=True), strict=True):
        for linear in view.linears():
            part = view.linear(linear)
            W = part.W.masked_fill(torch.rand(part.W.shape) < 0.3, 0.0)
            solution = Masked(name=linear, W=W.double(), loss=0.0, total=0.0)
            view.apply(solution)
            zeros += solution.zeros
            with torch.no_grad():
                place = stored(dense, linear)
                place.copy_(W.view_as(place))
    assert zeros_of(model) == zeros
    assert shape_of(model) == shape_of(stock)
    assert logits(model, ids).equal(logits(stock, ids))


def test_groups_are_blocks_of_one_weight() -> None:
    module = FactoredLinear(6, 12, rank=2, groups=3, bias=True).double()
    assert isinstance(module.wide, GroupedLinear)
    nn.init.normal_(module.wide.weight)
    nn.init.normal_(module.wide.bias)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    expected = module.narrow(x) @ torch.block_diag(*module.wide.weight) + module.bias
    torch.testing.assert_close(module(x), expected, **SAME)
    torch.testing.assert_close(module(x[0, 0]), expected[0, 0], **SAME)
    assert module.wide(module.narrow(x)).equal(module(x))


def test_a_factored_map_is_not_read_as_a_dense_one() -> None:
    view = layer_views(tiny("phi3"))[0]
    apply(view, v=4, up=7)
    for name in ("v", "ov", "up", "mlp"):
        with pytest.raises(TrisectError, match="already factored; compress the original model"):
            view.part(name)
    for name in ("v", "up"):
        with pytest.raises(TrisectError, match="already factored"):
            view.gradient(name)
    assert view.part("qk").width == 16


def test_solutions_that_do_not_fit_are_refused() -> None:
    view = layer_views(tiny("qwen2"))[0]
    good = factors(view.linear("k"), rank=4)
    for bad, message in (
        (replace(good, b=None), "with bias"),
        (replace(good, A=good.A[:-1]), r"\(48, 32\) map"),
        (replace(good, B=good.B[..., :-1]), r"\(48, 32\) map"),
        (replace(good, name="q", cached=True), "never cached"),
        (replace(good, name="gaet"), "Did you mean gate"),
        (replace(good, A=torch.ones(48, 40), B=torch.ones(1, 40, 32)), "groups of rank 40"),
        (Masked(name="k", W=torch.ones(3, 3), loss=0.0, total=0.0), r"\(3, 3\)"),
    ):
        with pytest.raises(TrisectError, match=message):
            view.apply(bad)
    assert view.shape().linears == ()


def test_damaged_weights_of_one_map_are_named() -> None:
    view = layer_views(tiny("gpt2"))[1]
    with torch.no_grad():
        stored(view, "k")[0, 0, 0] = torch.nan
    assert view.part("v").heads == 3
    with pytest.raises(TrisectError, match="Layer 1: W of k holds NaN"):
        view.part("k")
