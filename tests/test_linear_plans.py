"""Ranks planned from sizes alone are those that a compression has, and count what its modules really hold."""

from dataclasses import replace
from typing import Any

import pytest

from tiny_models import CONFIGS, tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.methods import METHODS
from trisect.models import layer_views, shape_of, zeros_of
from trisect.pipeline.rank_search import linear_plan, maps_of
from trisect.pipeline.run import compress
from trisect.plan import Plan, apply_plan, budget_of
from trisect.plan.budget import linear_heads, linear_sizes
from trisect.records.shapes import ModelShape

CALIBRATION = tokens_from_tensor(tokens(4, 30, seed=5))


def planned(shape: ModelShape, config: CompressConfig) -> Plan:
    return linear_plan(shape, config)


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_read_off_a_shape_are_those_of_the_maps(name: str) -> None:
    for view in layer_views(tiny(name)):
        layer = view.shape()
        behind = ("q", "k", "v") if layer.kv_in else ()
        plain = tuple(linear for linear in view.linears() if linear not in behind)
        assert maps_of(METHODS["svd"], layer, ("mlp", "qk", "ov")) == plain
        for linear in plain:
            part = view.linear(linear)
            if linear != "q" or not layer.output_gate:  # whose matrix holds the gate too
                assert linear_sizes(layer, linear) == part.W.shape
            assert linear_heads(layer, linear) == part.heads


@pytest.mark.parametrize("method", ["svd-llm", "wanda-sparse"])
def test_linear_maps_of_experts_are_refused_and_those_of_attention_are_not(method: str) -> None:
    shape = shape_of(tiny("qwen3_moe"))
    with pytest.raises(TrisectError, match=f"{method} takes linear maps one by one.*--parts qk,ov.*--method a3\\+"):
        planned(shape, CompressConfig(method=method, ratio=0.3, align=None))
    plan = planned(shape, CompressConfig(method=method, ratio=0.3, align=None, parts=("qk", "ov")))
    assert {linear.name for layer in plan.linears for linear in layer} == {"q", "k", "v", "o"}


@pytest.mark.parametrize("name", ["llama-gqa", "phi3", "gpt2"])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("svd", {"ratio": 0.3}),
        ("svd-llm", {"ratio": 0.3, "align": 8, "layers": (1,), "parts": ("ov", "mlp")}),
        ("asvd", {"ratio": 0.4, "allocate": "uniform"}),
        ("palu", {"kv_ratio": 0.5, "allocate": "uniform"}),
        ("wanda-sparse", {"ratio": 0.3}),
        ("wanda-2:4", {"ratio": 0.5}),
    ],
)
def test_a_plan_from_sizes_is_the_plan_that_is_carried_out(name: str, method: str, settings: dict[str, Any]) -> None:
    model = tiny(name)
    config = CompressConfig(method=method, **{"align": None, **settings})
    shape = shape_of(model)
    plan = planned(shape, config)
    assert compress(model, config, tokens=CALIBRATION).plan == plan
    assert shape_of(model) == apply_plan(shape, plan)
    assert budget_of(shape_of(model)).parameters == sum(p.numel() for p in model.parameters())
    if plan.masked:
        kept = sum(
            linear.rank * linear_sizes(layer, linear.name)[1]
            for layer, linears in zip(shape.layers, plan.linears, strict=True)
            for linear in linears
        )
        assert zeros_of(model) == budget_of(shape).linear_parameters - kept


@pytest.mark.parametrize("method", ["asvd", "svd-llm-v2", "palu"])
def test_searches_differ_from_map_to_map_and_keep_the_ratio(method: str) -> None:
    model = tiny("gpt2")
    shape = shape_of(model)
    config = CompressConfig(ratio=0.4, method=method, align=None, allocate="search")
    even = planned(shape, replace(config, allocate="uniform"))
    plan = compress(model, config, tokens=CALIBRATION).plan
    uniform = {(layer, entry.name): entry.rank for layer, maps in enumerate(even.linears) for entry in maps}
    # Maps that stay whole are in no plan.
    whole = {(layer, name): min(linear_sizes(shape.layers[layer], name)) for layer, name in uniform}
    ranks = whole | {(layer, entry.name): entry.rank for layer, maps in enumerate(plan.linears) for entry in maps}
    assert ranks != uniform
    if method == "asvd":  # one threshold for all maps, never over the budget
        kept = budget_of(shape_of(model)).linear_parameters / budget_of(shape).linear_parameters
        assert 0.3 < kept <= 0.6
    else:  # a mean over maps of one type, or over all keys and values, up to a rank each for rounding
        kinds = [["k", "v"]] if method == "palu" else [[name] for name in ("q", "k", "v", "o", "up", "down")]
        for kind in kinds:
            mine = [key for key in ranks if key[1] in kind]
            assert abs(sum(ranks[key] - uniform[key] for key in mine)) <= len(mine)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "asvd", "ratio": 0.3, "allocate": "search"}, "a plan alone.*--allocate uniform"),
        ({"method": "svd", "ratio": 0.3, "allocate": "search"}, "no rank search; use --allocate uniform"),
        ({"method": "svd", "ratio": 0.3, "allocate": "balanced"}, "no loss curves; use --allocate uniform"),
        ({"method": "svd", "ratio": 0.3, "budget": "flops"}, "ratio of their weights; use .*no --budget"),
        ({"method": "palu", "ratio": 0.3, "budget": "flops"}, "ratio of the KV cache; use .*no --budget"),
        ({"method": "svd", "kv_ratio": 0.3}, "--ratio 0.25"),
        ({"method": "svd", "max_ppl_increase": "5%"}, "--ratio 0.25"),
        ({"method": "palu", "ratio": 0.3, "parts": ("mlp",)}, "changes nothing in mlp; use --parts qk,ov"),
        ({"method": "wanda-2:4", "ratio": 0.3}, "--ratio 0.5"),
        ({"method": "svd", "ratio": 0.3, "layers": (7,)}, "no layer 7"),
    ],
)
def test_what_cannot_be_planned_says_what_can(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrisectError, match=message):
        planned(shape_of(tiny("gpt2")), CompressConfig(**settings))


def test_a_factored_model_is_refused_before_anything_is_changed() -> None:
    model = tiny("gpt2")
    compress(model, CompressConfig(ratio=0.3, method="svd", parts=("mlp",)), tokens=CALIBRATION)
    with pytest.raises(TrisectError, match="Layer 0: up is already factored"):
        planned(shape_of(model), CompressConfig(ratio=0.3, method="svd-llm"))
