"""Parts without values: room for weights that are loaded afterwards."""

import torch

from trisect.parts import MLP, OV, QK, Factored, Linear
from trisect.shapes import LayerShape, LinearShape


def blank_qk(shape: LayerShape) -> QK:
    """Queries and keys of a layer of this shape."""
    h, k, D, d = shape.heads, shape.kv_heads, shape.d_model, shape.qk
    return QK(
        W_q=torch.empty(h, D, d),
        W_k=torch.empty(k, D, d),
        b_q=torch.empty(h, d) if shape.qk_bias else None,
        b_k=torch.empty(k, d) if shape.qk_bias else None,
        frequencies=torch.empty(k, shape.pairs, dtype=torch.int64),
        norm_q=torch.empty(h, d) if shape.qk_norm else None,
        norm_k=torch.empty(k, d) if shape.qk_norm else None,
        rates=torch.empty(k, shape.pairs) if shape.folded else None,
    )


def blank_ov(shape: LayerShape) -> OV:
    """Values and outputs of a layer of this shape."""
    h, k, D, d = shape.heads, shape.kv_heads, shape.d_model, shape.vo
    return OV(
        W_v=torch.empty(k, D, d),
        W_o=torch.empty(1 if shape.shared_output else h, d, D),
        b_v=torch.empty(k, d) if shape.v_bias else None,
        b_o=torch.empty(D) if shape.o_bias else None,
        heads=h,
    )


def blank_mlp(shape: LayerShape) -> MLP:
    """The MLP of a layer of this shape."""
    D, inter = shape.d_model, shape.mlp
    return MLP(
        W_up=torch.empty(D, inter),
        W_gate=torch.empty(D, inter) if shape.gated else None,
        W_down=torch.empty(inter, D),
        b_up=torch.empty(inter) if shape.up_bias else None,
        b_gate=torch.empty(inter) if shape.gated and shape.up_bias else None,
        b_down=torch.empty(D) if shape.down_bias else None,
    )


def blank_factored(linear: LinearShape, whole: Linear) -> Factored:
    """Factors in place of a map."""
    d_in, d_out = whole.W.shape
    return Factored(
        name=linear.name,
        A=torch.empty(d_in, linear.groups * linear.rank),
        B=torch.empty(linear.groups, linear.rank, d_out // linear.groups),
        b=whole.b,
        cached=linear.cached,
        loss=0.0,
        total=0.0,
    )
