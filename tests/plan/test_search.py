"""The search over layer ratios: one ratio per layer, and the best ones."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_curves import KEYS, LAYERS, MODEL, RISES, curves_from, shape_with, widths_in

from trisect.config import CompressConfig
from trisect.plan import apply_plan, budget_of, plan_for
from trisect.plan.problem import grid_of
from trisect.records.parts import COMPONENTS


def uniform_widths(layer: int, ratio: float) -> tuple[int, ...]:
    return tuple(grid_of(LAYERS[layer], part, align=8).width_at(ratio) for part in COMPONENTS)


def candidates(layer: int, floors: list[int]) -> set[tuple[int, ...]]:
    """Every triple of widths that a ratio in hundredths gives, held up where the curves end."""
    return {
        tuple(max(width, floor) for width, floor in zip(uniform_widths(layer, k / 100), floors, strict=True))
        for k in range(100)
    }


@settings(max_examples=40)
@given(rises=RISES, percent=st.integers(1, 40))
def test_no_pair_of_layer_ratios_loses_less(rises, percent):
    curves, full = curves_from(rises), budget_of(MODEL)
    allowed = (100 - percent) * full.linear_parameters // 100
    target = allowed + full.parameters - full.linear_parameters
    plan = plan_for(MODEL, CompressConfig(target_params=target, allocate="search", align=8), curves)
    floors = [[curves.floor(layer, part) for part in COMPONENTS] for layer in (0, 1)]
    found = []
    for pair in itertools.product(candidates(0, floors[0]), candidates(1, floors[1])):
        every = {(layer, part): pair[layer][n] for layer in (0, 1) for n, part in enumerate(COMPONENTS)}
        if budget_of(shape_with(every)).parameters <= target:
            found.append(sum(curves.loss_at(*key, width) for key, width in every.items()))
    assert budget_of(apply_plan(MODEL, plan)).parameters <= target
    # The last steps are of single components, so it may be less.
    assert curves.rise(MODEL, plan) <= min(found) + 1e-9


@settings(max_examples=20)
@given(percent=st.integers(5, 40))
def test_layers_have_one_ratio_up_to_the_last_steps(percent):
    curves = curves_from([[0.1, 0.2, 0.3]] * len(KEYS))
    widths = widths_in(plan_for(MODEL, CompressConfig(ratio=percent / 100, allocate="search", align=8), curves))
    floors = [[curves.floor(layer, part) for part in COMPONENTS] for layer in (0, 1)]
    off = [
        min(
            sum(widths[layer, part] != of for part, of in zip(COMPONENTS, widths_there, strict=True))
            for widths_there in candidates(layer, floors[layer])
        )
        for layer in (0, 1)
    ]
    assert sum(off) <= 3


def test_the_layer_that_loses_most_is_cut_least():
    rises = [[1.0] * 3 if layer == 0 else [0.01] * 3 for layer, _ in KEYS]
    widths = widths_in(plan_for(MODEL, CompressConfig(ratio=0.05, allocate="search", align=8), curves_from(rises)))
    assert all(widths[0, part] == LAYERS[0].width(part) for part in COMPONENTS)
    assert any(widths[1, part] < LAYERS[1].width(part) for part in COMPONENTS)
