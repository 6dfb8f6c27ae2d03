"""Widths land on the grid, or nothing is promised."""

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_shapes import layer_shape, model_shape, uniform_plan

from trisect.errors import TrisectError
from trisect.plan.problem import MLP_STEPS, grid_of
from trisect.records.shapes import widths_of

RATIOS = st.integers(1, 99).map(lambda k: k / 100)
ALIGNMENTS = st.sampled_from([8, 16, 32, None])
COMPONENTS = st.sampled_from(["qk", "ov", "mlp"])
LAYERS = st.builds(
    lambda half, pairs, vo, mlp: layer_shape(qk=2 * half, pairs=min(pairs, half), vo=vo, mlp=mlp),
    half=st.integers(8, 160),
    pairs=st.sampled_from([0, 4, 10_000]),
    vo=st.integers(16, 300),
    mlp=st.integers(64, 20_000),
)


def step_for(component: str, align: int) -> int:
    return MLP_STEPS[align] if component == "mlp" else align


@given(layer=LAYERS, component=COMPONENTS, align=ALIGNMENTS, ratio=RATIOS)
def test_a_width_never_grows(layer, component, align, ratio):
    assert grid_of(layer, component, align=align).width_at(ratio) <= layer.width(component)


@given(layer=LAYERS, component=COMPONENTS, align=st.sampled_from([8, 16, 32]), ratio=RATIOS)
def test_a_changed_width_is_a_multiple_of_the_step(layer, component, align, ratio):
    width = grid_of(layer, component, align=align).width_at(ratio)
    assert width == layer.width(component) or width % step_for(component, align) == 0


@given(layer=LAYERS, component=COMPONENTS, align=st.sampled_from([8, 16, 32]), ratio=RATIOS)
def test_no_other_allowed_width_is_nearer(layer, component, align, ratio):
    full, step = layer.width(component), step_for(component, align)
    width = grid_of(layer, component, align=align).width_at(ratio)
    target = (1 - Fraction(str(ratio))) * full
    gaps = {other: abs(other - target) for other in (*range(0, full, step), full)}
    assert gaps[width] == min(gaps.values())
    assert width == min(other for other in gaps if gaps[other] == gaps[width]), "ties go down"


@given(layer=LAYERS, align=ALIGNMENTS, ratio=RATIOS)
def test_rotated_heads_stay_even(layer, align, ratio):
    if layer.pairs:
        assert grid_of(layer, "qk", align=align).width_at(ratio) % 2 == 0


@given(layer=LAYERS, component=COMPONENTS, align=ALIGNMENTS, ratios=st.lists(RATIOS, min_size=2).map(sorted))
def test_a_larger_ratio_never_gives_a_larger_width(layer, component, align, ratios):
    widths = [grid_of(layer, component, align=align).width_at(ratio) for ratio in ratios]
    assert widths == sorted(widths, reverse=True)


@settings(deadline=None)
@given(layer=LAYERS, align=ALIGNMENTS, ratio=RATIOS)
def test_a_plan_holds_or_the_ratio_it_offers_does(layer, align, ratio):
    shape = model_shape(layer, layer)
    choice = {"parts": ("qk", "ov", "mlp"), "layers": None, "align": align}
    refusal = refused(shape, ratio, choice)
    if "too narrow" in refusal or "reach 0.00" in refusal:
        return
    if refusal:
        reach, step = re.search(r"reach (0\.\d+)|smallest step of a width is ([\d.e-]+)", refusal).groups()
        assert float(reach) < ratio if reach else float(step) > ratio
        ratio = float(reach or step)
    plan = uniform_plan(shape, ratio=ratio, **choice)
    for widths in plan.layers:
        assert min(widths.qk, widths.vo) >= 2
        assert widths.mlp >= 1
        assert 2 * widths.pairs <= widths.qk


def refused(shape, ratio: float, choice: dict) -> str:
    try:
        uniform_plan(shape, ratio=ratio, **choice)
    except TrisectError as error:
        return str(error)
    return ""


def test_exact_ranks_are_the_papers():
    shape = model_shape(layer_shape(qk=128, pairs=0, vo=128, mlp=13824))
    (widths,) = uniform_plan(shape, ratio=0.2, parts=("qk", "ov", "mlp"), layers=None, align=None).layers
    assert (widths.qk, widths.vo, widths.mlp) == (102, 102, 11059)


def test_full_rotary_heads_keep_half_as_many_pairs():
    shape = model_shape(layer_shape(qk=64, pairs=32, vo=64, mlp=1536))
    (widths,) = uniform_plan(shape, ratio=0.25, parts=("qk",), layers=None, align=16).layers
    assert (widths.qk, widths.pairs, widths.vo, widths.mlp) == (48, 24, 64, 1536)


def test_unchosen_layers_and_parts_are_left_alone():
    layer = layer_shape(qk=64, pairs=32, vo=64, mlp=1536)
    plan = uniform_plan(model_shape(layer, layer, layer), ratio=0.25, parts=("mlp",), layers=(1,), align=16)
    assert plan.layers[0] == plan.layers[2] == widths_of(layer)
    assert plan.layers[1].mlp == 1152
    assert plan.layers[1].qk == 64


def test_a_ratio_that_removes_nothing_names_one_that_does_not():
    shape = model_shape(layer_shape(qk=64, pairs=32, vo=64, mlp=128))
    with pytest.raises(TrisectError, match=r"removes nothing.*0\.0834 with --align 16; --align none"):
        uniform_plan(shape, ratio=0.08, parts=("qk", "ov", "mlp"), layers=None, align=16)
    (widths,) = uniform_plan(shape, ratio=0.0834, parts=("qk", "ov", "mlp"), layers=None, align=16).layers
    assert (widths.qk, widths.vo, widths.mlp) == (48, 64, 128)


def test_what_is_at_its_minimum_is_made_up_for_by_the_rest():
    shape = model_shape(layer_shape(qk=16, pairs=8, vo=64, mlp=4096))
    (widths,) = uniform_plan(shape, ratio=0.5, parts=("qk", "ov", "mlp"), layers=None, align=16).layers
    assert widths.qk == 16
    assert widths.vo <= 32
    assert widths.mlp <= 2048


def test_a_model_too_narrow_for_the_grid_is_told_so():
    shape = model_shape(layer_shape(qk=16, pairs=8, vo=16, mlp=64))
    with pytest.raises(TrisectError, match="too narrow to be cut at all with --align 16; --align none"):
        uniform_plan(shape, ratio=0.6, parts=("qk", "ov", "mlp"), layers=None, align=16)


def test_a_layer_that_is_not_there_is_refused():
    shape = model_shape(layer_shape(qk=64, pairs=32, vo=64, mlp=4096))
    with pytest.raises(TrisectError, match="no layer 3"):
        uniform_plan(shape, ratio=0.5, parts=("qk",), layers=(3,), align=16)
