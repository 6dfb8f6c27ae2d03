"""The search over layer ratios: one ratio per layer, and the best ones."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_curves import KEYS, LAYERS, MODEL, RISES, curves_from, widths_in

from trisect.config import CompressConfig
from trisect.parts import COMPONENTS
from trisect.plan import apply_plan, budget_of, plan_for, uniform_plan
from trisect.plan.align import grid_of


def uniform_widths(layer: int, ratio: float) -> tuple[int, ...]:
    return tuple(grid_of(LAYERS[layer], part, align=8).width_at(ratio) for part in COMPONENTS)


def candidates(layer: int, floors: list[int]) -> set[tuple[int, ...]]:
    """Every triple of widths that a ratio in hundredths gives, held up where the curves end."""
    return {
        tuple(max(width, floor) for width, floor in zip(uniform_widths(layer, k / 100), floors, strict=True))
        for k in range(100)
    }


@settings(deadline=None, max_examples=40)
@given(rises=RISES, percent=st.integers(1, 40))
def test_no_other_pair_of_layer_ratios_loses_less(rises, percent):
    curves = curves_from(rises)
    plan = plan_for(MODEL, CompressConfig(ratio=percent / 100, allocate="search", align=8), curves)
    widths = widths_in(plan)
    allowed = (100 - percent) * budget_of(MODEL).linear_parameters / 100
    floors = [[curves.floor(layer, part) for part in COMPONENTS] for layer in (0, 1)]
    found = []
    for pair in itertools.product(candidates(0, floors[0]), candidates(1, floors[1])):
        every = {(layer, part): pair[layer][n] for layer in (0, 1) for n, part in enumerate(COMPONENTS)}
        if cost(every) <= allowed:
            found.append(sum(curves.loss_at(*key, width) for key, width in every.items()))
    assert tuple(widths[0, part] for part in COMPONENTS) in candidates(0, floors[0])
    assert budget_of(apply_plan(MODEL, plan)).linear_parameters <= allowed
    assert curves.rise(MODEL, plan) == pytest.approx(min(found), abs=1e-9)


def cost(widths: dict[tuple[int, str], int]) -> int:
    layers = zip(LAYERS, (0, 1), strict=True)
    return sum(
        layer.d_model * (layer.heads + layer.kv_heads) * (widths[n, "qk"] + widths[n, "ov"])
        + layer.d_model * (3 if layer.gated else 2) * widths[n, "mlp"]
        for layer, n in layers
    )


def test_alike_layers_with_alike_curves_end_near_uniform():
    curves = curves_from([[0.1, 0.2, 0.3]] * len(KEYS))
    plan = plan_for(MODEL, CompressConfig(ratio=0.25, allocate="search", align=8), curves)
    uniform = uniform_plan(MODEL, ratio=0.25, parts=COMPONENTS, layers=None, align=8)
    assert plan.layers[0] == uniform.layers[0]


def test_the_layer_that_loses_most_is_cut_least():
    rises = [[1.0] * 3 if layer == 0 else [0.01] * 3 for layer, _ in KEYS]
    widths = widths_in(
        plan_for(MODEL, CompressConfig(ratio=0.05, allocate="search", align=8), curves_from(rises))
    )
    assert all(widths[0, part] == LAYERS[0].width(part) for part in COMPONENTS)
    assert any(widths[1, part] < LAYERS[1].width(part) for part in COMPONENTS)
