"""A decoder layer in five launches: four products that norm, gate and add by themselves, and attention."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trisect.decode.prepare import SILU, FusedGate, FusedNorm, PackedGate
from trisect.kernels.norm import normed
from trisect.kernels.product import is_one_row, product
from trisect.models import LayerView
from trisect.models.attention import Attention
from trisect.models.linear import FusedMaps
from trisect.models.norms import eps_of
from trisect.models.owned import mix_in

PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
Matrix = tuple[Tensor, Tensor | None]
"""Weight and bias."""
ALIGN = 8
"""Rows of a weight begin at multiples of sixteen bytes, or the kernel would read them bit by bit."""


class FusedLayer(nn.Module):
    """Mixed in before a stock layer of norm, attention, sum, norm, MLP, sum: for one new token of one text."""

    input_layernorm: FusedNorm
    self_attn: Attention
    post_attention_layernorm: FusedNorm
    mlp: Any
    behind: tuple[FusedNorm, ...]
    """The norm that the next layer begins with, if there is one; in a tuple, since it is no part of this layer."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The stock layer's output; a Decoder's clock carries what the next layer's norm needs to know of it."""
        if torch.compiler.is_compiling() or args:
            return super().forward(hidden_states, *args, **kwargs)
        matrices = self._matrices(hidden_states, kwargs.get("past_key_values"))
        if matrices is None:
            return super().forward(hidden_states, *args, **kwargs)
        attention, clock = self.self_attn, self.self_attn.live.clock
        first, second, hidden = self.input_layernorm, self.post_attention_layernorm, hidden_states.squeeze(1)
        before, norm, carried = clock.carried
        if before is hidden_states and norm is first:
            x, squares = carried
        else:
            x, squares = normed(hidden, first.weight, eps_of(first)), None
        qkv, o, gate_up, down = matrices
        y, _ = product(x, *qkv, squares=squares, eps=eps_of(first))
        heads = attention.decoded(y.unsqueeze(1), kwargs.get("position_embeddings"), kwargs.get("position_ids"))
        hidden, (x, squares) = product(heads.squeeze(1), *o, residual=hidden, gain=second.weight)
        y, _ = product(x, *gate_up, squares=squares, eps=eps_of(second), gate=True)
        kind = hidden.device, hidden.dtype
        norm = next((norm for norm in self.behind if (norm.weight.device, norm.weight.dtype) == kind), None)
        hidden, carried = product(y, *down, residual=hidden, gain=None if norm is None else norm.weight)
        out = hidden.unsqueeze(1)
        clock.carried = out, norm, carried
        return out

    def _matrices(self, x: Tensor, cache: Any) -> tuple[Matrix, ...] | None:
        """Those of qkv, o, gate and up, and down; None where the layer has to run as it is."""
        a, mlp = self.self_attn, self.mlp
        norms = self.input_layernorm, self.post_attention_layernorm
        if x.ndim != 3 or not is_one_row(x) or not a._decodes(cache, x):
            return None
        if a.shared_output or a.family.output_gate or any(norm.weight.dtype != x.dtype for norm in norms):
            return None
        if isinstance(mlp, PackedGate):
            gate_up, active = matrix_of([mlp.gate_up_proj], None), mlp.activation_fn
        else:
            gate_up, active = matrix_of([mlp.gate_proj, mlp.up_proj], mlp.fused), mlp.act_fn
        qkv = matrix_of([getattr(a, name) for name in a.family.qkv], a.fused)
        o, down = matrix_of([getattr(a, a.family.o)], None), matrix_of([mlp.down_proj], None)
        if qkv is None or o is None or gate_up is None or down is None or not isinstance(active, SILU):
            return None
        return qkv, o, gate_up, down


def matrix_of(modules: Sequence[nn.Module], fused: FusedMaps | None) -> Matrix | None:
    """The matrix that makes all modules' outputs side by side, if they are plain maps whose rows it takes."""
    only = modules[0]
    if fused is not None and fused.applies(modules):
        weight, bias = fused.weight, fused.bias
    elif len(modules) == 1 and type(only) is nn.Linear and only.weight.is_contiguous():
        weight, bias = only.weight, only.bias
    else:
        return None
    return None if weight.shape[1] % ALIGN else (weight, bias)


def fuse_layers(views: Sequence[LayerView]) -> None:
    """Let layers run as fused ones where that is what they compute."""
    layers: list[Any] = [view.layer for view in views]
    fits = [isinstance(layer, FusedLayer) or (has_parts(layer) and sums_twice(layer)) for layer in layers]
    for number, layer in enumerate(layers):
        if fits[number]:
            mix_in(FusedLayer, layer, "Fused")
            layer.behind = tuple(n.input_layernorm for n in layers[number + 1 : number + 2] if fits[number + 1])


def has_parts(layer: nn.Module) -> bool:
    """Whether a layer's parts are ours by now."""
    kinds = FusedNorm, Attention, FusedNorm, FusedGate | PackedGate
    others = [module for name, module in layer.named_children() if name not in PARTS]
    here = all(isinstance(getattr(layer, name, None), kind) for name, kind in zip(PARTS, kinds, strict=True))
    return here and all(isinstance(module, nn.Dropout) for module in others)


class _Times(nn.Module):
    def __init__(self, factor: float, *, attends: bool):
        super().__init__()
        self.factor, self.attends = factor, attends

    def forward(self, x: Any = None, hidden_states: Any = None, **kwargs: Any) -> Any:
        out = (hidden_states if x is None else x) * self.factor
        return (out, None) if self.attends else out


def sums_twice(layer: nn.Module) -> bool:
    """Whether a layer adds attention of the normed input, then the MLP of that normed: found by trying."""
    double = copy.copy(layer)
    parts = {
        name: _Times(factor, attends=name == "self_attn") for name, factor in zip(PARTS, (2, 3, 5, 7), strict=True)
    }
    double._modules = {**layer._modules, **parts}
    x = torch.ones(1, 1, 1)
    try:
        out = double.forward(x, attention_mask=None, position_ids=None, position_embeddings=None, past_key_values=None)
    except Exception:  # whatever else a layer wants, it is not this kind
        return False
    return isinstance(out, Tensor) and bool((out == (1 + 2 * 3) * (1 + 5 * 7)).all())
