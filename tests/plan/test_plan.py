"""Plans survive JSON and fit only the model they were made for."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_shapes import layer_shape, model_shape

from trisect.errors import TrisectError
from trisect.plan import Plan, apply_plan
from trisect.records.shapes import LayerWidths, widths_of

WIDTHS = st.builds(
    LayerWidths, qk=st.integers(1, 512), pairs=st.integers(0, 256), vo=st.integers(1, 512), mlp=st.integers(1, 50_000)
)
PLANS = st.builds(
    Plan,
    layers=st.lists(WIDTHS, min_size=1, max_size=5).map(tuple),
    method=st.sampled_from(["a3", "a3+"]),
    ratio=st.floats(0.01, 0.99),
    align=st.sampled_from([8, 16, 32, None]),
)


@given(plan=PLANS)
def test_a_plan_comes_back_from_json_as_it_was(plan):
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@given(widths=WIDTHS)
def test_an_applied_plan_gives_the_layers_its_widths(widths):
    shape = model_shape(layer_shape(qk=512, pairs=256, vo=512, mlp=50_000))
    plan = Plan(layers=(widths,), method="a3", ratio=0.5, align=None)
    assert widths_of(apply_plan(shape, plan).layers[0]) == widths


def test_a_plan_for_another_depth_is_refused():
    layer = layer_shape(qk=64, pairs=32, vo=64, mlp=128)
    plan = Plan(layers=(widths_of(layer),), method="a3", ratio=0.5, align=16)
    with pytest.raises(TrisectError, match="1 layers, but the model has 2"):
        apply_plan(model_shape(layer, layer), plan)


def test_an_unknown_key_is_named():
    with pytest.raises(TrisectError, match="Unknown key in a plan 'ratios'. Did you mean ratio?"):
        Plan.from_dict({"ratios": 1})


def test_a_missing_key_is_named():
    with pytest.raises(TrisectError, match="layers is missing"):
        Plan.from_dict({"method": "a3", "ratio": 0.5, "align": None})
