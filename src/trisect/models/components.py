"""The three components of a layer in canonical layout: read from its linear maps, written back narrower.

h = query heads, k = key/value heads, D = d_model, d = head width, I = MLP width, P = rotation pairs
"""

import logging
from dataclasses import replace

import torch
from torch import Tensor, nn

from trisect.models.maps import Dense, LayerMaps
from trisect.models.rotary import HeadNorm, eps_of, from_canonical, loaded_rates, stored_rates, to_canonical
from trisect.records.parts import MLP, OV, QK, Factored, Linear
from trisect.records.shapes import LayerShape, LinearShape


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


log = logging.getLogger(__name__)


def read_qk(layer: LayerMaps) -> QK:
    """Queries and keys, rotation pairs in canonical order."""
    a = layer.attention
    (W_q, b_q), (W_k, b_k) = _heads(layer.dense("q"), a.heads), _heads(layer.dense("k"), a.kv_heads)
    norms = _norm_weights(layer)
    return QK(
        W_q=_canonical(layer, W_q),
        W_k=_canonical(layer, W_k),
        b_q=None if b_q is None else _canonical(layer, b_q),
        b_k=None if b_k is None else _canonical(layer, b_k),
        frequencies=_frequencies(layer),
        rates=None if a.rotary_rates is None else loaded_rates(a.rotary_rates).double(),
        norm_q=None if norms is None else _canonical(layer, norms[0].expand(a.heads, -1)),
        norm_k=None if norms is None else _canonical(layer, norms[1].expand(a.kv_heads, -1)),
    )


def read_ov(layer: LayerMaps) -> OV:
    """Values and outputs, head by head."""
    a = layer.attention
    W_v, b_v = _heads(layer.dense("v"), a.kv_heads)
    W_o, b_o = layer.dense("o")
    W_o = W_o.unflatten(0, (1 if a.shared_output else a.heads, -1))
    return OV(W_v=W_v, W_o=W_o, b_v=b_v, b_o=b_o, heads=a.heads)


def read_mlp(layer: LayerMaps) -> MLP:
    (W_up, b_up), (W_down, b_down) = layer.dense("up"), layer.dense("down")
    W_gate, b_gate = layer.dense("gate") if "gate" in layer.linears() else (None, None)
    return MLP(W_up=W_up, W_gate=W_gate, W_down=W_down, b_up=b_up, b_gate=b_gate, b_down=b_down)


def write_qk(layer: LayerMaps, part: QK) -> None:
    """Put queries and keys in place of the layer's, with the frequencies and norms that narrow heads need."""
    a, f = layer.attention, layer.family
    W_q, W_k = (from_canonical(x, part.num_pairs, f.rotary) for x in (part.W_q, part.W_k))
    b_q, b_k = (
        None if x is None else from_canonical(x, part.num_pairs, f.rotary) for x in (part.b_q, part.b_k)
    )
    narrowed = (part.width, part.num_pairs) != (a.qk_width, a.num_pairs) or part.rates is not None
    narrowed |= a.rotary_index is not None
    maps = {"q": _flat(W_q, b_q), "k": _flat(W_k, b_k)}
    layer.write_dense(maps, layout=replace(a.layout, qk=part.width))
    a.qk_width, a.num_pairs = part.width, part.num_pairs
    if not narrowed:
        return
    if (2 * part.num_pairs != part.width or part.rates is not None) and a.clips_qk is not None:
        _drop_clamp(layer, "queries and keys", a.clips_qk)
        a.clips_qk = None
    a.rotary_index = part.frequencies.to(torch.int16) if part.num_pairs else None
    a.rotary_rates = None if part.rates is None else stored_rates(part.rates)
    if f.norms is not None:
        _write_norms(layer, part)


def write_ov(layer: LayerMaps, part: OV) -> None:
    """Put values and outputs in place of the layer's."""
    a = layer.attention
    if part.width != a.vo_width and a.clips_v is not None:
        _drop_clamp(layer, "values", a.clips_v)
        a.clips_v = None
    maps = {"v": _flat(part.W_v, part.b_v), "o": (part.W_o.flatten(0, 1), part.b_o)}
    layer.write_dense(maps, layout=replace(a.layout, vo=part.width))
    a.vo_width, a.shared_output = part.width, part.W_o.shape[0] != a.heads


def write_mlp(layer: LayerMaps, part: MLP) -> None:
    maps: dict[str, Dense] = {"up": (part.W_up, part.b_up), "down": (part.W_down, part.b_down)}
    if part.W_gate is not None:
        maps["gate"] = (part.W_gate, part.b_gate)
    layer.write_dense(maps)


def _heads(dense: Dense, heads: int) -> Dense:
    """Weight (D, h d) as (h, D, d), bias (h d,) as (h, d)."""
    W, b = dense
    return W.unflatten(-1, (heads, -1)).movedim(-2, 0), None if b is None else b.unflatten(-1, (heads, -1))


def _flat(W: Tensor, b: Tensor | None) -> Dense:
    """Undo `_heads`."""
    return W.movedim(0, -2).flatten(-2), None if b is None else b.flatten()


def _frequencies(layer: LayerMaps) -> Tensor:
    a = layer.attention
    if a.rotary_index is not None:
        return a.rotary_index.long()
    device = next(a.parameters()).device
    return torch.arange(a.num_pairs, device=device).expand(a.kv_heads, -1)


def _norm_weights(layer: LayerMaps) -> tuple[Tensor, Tensor] | None:
    if layer.family.norms is None:
        return None
    q_norm, k_norm = (getattr(layer.attention, name) for name in layer.family.norms)
    return q_norm.weight.detach(), k_norm.weight.detach()


def _canonical(layer: LayerMaps, x: Tensor) -> Tensor:
    return to_canonical(x, layer.attention.num_pairs, layer.family.rotary)


def _drop_clamp(layer: LayerMaps, what: str, bound: float) -> None:
    """Clamping commutes with keeping channels, not with mixing them: say once that it is gone."""
    if layer.index == 0:
        log.warning("narrowed %s are no longer clamped to %g: their channels are mixed now", what, bound)


def _write_norms(layer: LayerMaps, part: QK) -> None:
    assert layer.family.norms is not None
    for name, weight in zip(layer.family.norms, (part.norm_q, part.norm_k), strict=True):
        assert weight is not None
        old = getattr(layer.attention, name)
        new = HeadNorm(weight.shape[0], weight.shape[1], eps=eps_of(old))
        stored = from_canonical(weight, part.num_pairs, layer.family.rotary)
        stored = stored.to(old.weight.dtype).contiguous()
        new.weight = nn.Parameter(stored, requires_grad=old.weight.requires_grad)
        setattr(layer.attention, name, new)
