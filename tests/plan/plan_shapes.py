"""Shapes for the tests of plans."""

from typing import Any

from hypothesis import strategies as st

from trisect.config import CompressConfig
from trisect.plan import Plan, plan_for
from trisect.records.shapes import LayerShape, ModelShape

SIZES = st.integers(1, 12)


def layer_shape(
    *,
    qk: int,
    pairs: int,
    vo: int,
    mlp: int,
    d_model: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    gated: bool = True,
    bias: bool = False,
) -> LayerShape:
    """One layer; `bias` gives every linear map one."""
    return LayerShape(
        d_model=d_model,
        heads=heads,
        kv_heads=kv_heads,
        qk=qk,
        pairs=pairs,
        vo=vo,
        mlp=mlp,
        gated=gated,
        qk_bias=bias,
        v_bias=bias,
        o_bias=bias,
        up_bias=bias,
        down_bias=bias,
    )


SMALL_LAYERS = st.builds(
    lambda group, kv_heads, **sizes: layer_shape(heads=group * kv_heads, kv_heads=kv_heads, pairs=0, **sizes),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    d_model=SIZES,
    qk=SIZES,
    vo=SIZES,
    mlp=SIZES,
    gated=st.booleans(),
    bias=st.booleans(),
)


def model_shape(*layers: LayerShape, other: int = 1000) -> ModelShape:
    """A model of these layers in a 2-byte type."""
    return ModelShape(layers=layers, other_parameters=other, bytes_per_element=2)


def uniform_plan(shape: ModelShape, **settings: Any) -> Plan:
    """The uniform plan for a ratio."""
    return plan_for(shape, CompressConfig(**{"method": "a3", "allocate": "uniform", **settings}))
