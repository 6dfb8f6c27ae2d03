"""What heads pass between projection and output: norms, rotations, attention functions.

b = batch, t = tokens, h = query heads, k = key/value heads
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trisect.kernels.rotary import Layout, joined_pairs, split_pairs
from trisect.kernels.sdpa import padded, sdpa
from trisect.models.families import Family
from trisect.records.parts import MLP, OV, Part


class HeadNorm(nn.Module):
    """RMS-norm of (..., heads, width), weights per head; float32 inside as in stock."""

    # The mean is each head's own, or with `together` one over all heads.

    def __init__(self, heads: int, width: int, eps: float, *, together: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, width))
        self.eps, self.dims = eps, (-2, -1) if together else (-1,)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(self.dims, keepdim=True) + self.eps)
        # The last step keeps vLLM from taking this for a norm with one set of weights, and replacing it.
        return (self.weight * wide.to(x.dtype)).view_as(x)


def norm_weights(norm: Any, *, heads: int, width: int, offset: float) -> Tensor:
    """What a norm of heads multiplies their channels with, (heads, width), however its modules hold it."""
    if isinstance(norm, HeadNorm):
        return norm.weight.detach()
    held = [weight.detach() for name, weight in norm.named_parameters() if name.endswith("weight")]
    if not held:
        return torch.ones(heads, width)
    weights = torch.cat([weight.flatten() for weight in held])
    weights = weights.float() + offset if offset else weights
    return weights.reshape(-1, width).expand(heads, -1)


def eps_of(norm: Any) -> Any:
    """What a norm adds to the mean square, by either of the names in use; None if it has neither."""
    return getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)


QUIET = 2.0**-10  # share of a post-norm's largest weight below which a channel counts as silent


def post_norm(layer: nn.Module, family: Family, component: str) -> tuple[Tensor, float] | None:
    """Weights (D,) and epsilon of the RMS-norm between a component's output and the residual stream."""
    if family.post_norms is None:
        return None
    attention, mlp = family.post_norms
    norm: Any = layer.get_submodule(mlp if component == "mlp" else attention)
    return norm.weight.detach().float() + family.norm_offset, eps_of(norm)


def gain(layer: nn.Module, family: Family, component: str) -> Tensor | None:
    """What output channels (D,) of OV or MLP are multiplied with in a part."""
    # A post-norm multiplies them by its weights: the nearest powers of two, which no rounding sees.
    found = post_norm(layer, family, component)
    if found is None:
        return None
    size = found[0].abs()
    size = size.clamp(min=size.max().clamp(min=torch.finfo(size.dtype).tiny) * QUIET)
    return torch.ldexp(torch.ones_like(size), size.log2().round().int())


def in_units(part: Part, layer: nn.Module, family: Family, *, inverse: bool = False) -> Part:
    """A part with its outputs times their gain, or over it, in float32 at least.              [math.md F-7]"""
    name = "ov" if isinstance(part, OV) else "mlp"
    unit = gain(layer, family, name) if isinstance(part, OV | MLP) else None
    if unit is None:
        return part
    unit = 1 / unit if inverse else unit

    def times(x: Tensor | None) -> Any:
        return None if x is None else x.to(torch.promote_types(x.dtype, torch.float32)) * unit.to(x.device)

    if isinstance(part, OV):
        return replace(part, W_o=times(part.W_o), b_o=times(part.b_o))
    assert isinstance(part, MLP)
    return replace(part, W_down=times(part.W_down), b_down=times(part.b_down))


STATIC_ROTATIONS = ("default", "linear", "llama3", "yarn")  # do not change with the length of the text


@dataclass(frozen=True)
class Rotation:
    """How a model's own table turns: radians per token, and what it multiplies queries and keys with."""

    rates: Tensor  # (n,)
    scaling: float


def rotation_of(decoder: nn.Module) -> Rotation | None:
    """The rotation of the module that holds the layers, if it is one for all layers and lengths."""
    found: list[Any] = [module for module in decoder.modules() if hasattr(module, "inv_freq")]
    if len(found) != 1 or getattr(found[0], "rope_type", "default") not in STATIC_ROTATIONS:
        return None
    scaling = float(getattr(found[0], "attention_scaling", 1.0))
    return Rotation(found[0].inv_freq.detach().double(), scaling)


def ropes_of(config: Any) -> list[dict[str, Any]]:
    """The rotations of a text config: one, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    inner = [value for value in rope.values() if isinstance(value, dict)]
    return inner or [rope]


def rope_of(config: Any, layer: int) -> dict[str, Any]:
    """The rotation of one layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = getattr(config, "layer_types", None) or ()
    own = rope.get(kinds[layer]) if layer < len(kinds) else None
    return own if isinstance(own, dict) else rope


def stored_rates(rates: Tensor) -> Tensor:
    """Rates as the bits of float32: `model.to(bfloat16)` casts every floating buffer, and would ruin them."""
    return rates.float().contiguous().view(torch.int32)


def loaded_rates(stored: Tensor) -> Tensor:
    """Undo stored_rates."""
    return stored.view(torch.float32)


def to_canonical(x: Tensor, num_pairs: int, layout: Layout | None) -> Tensor:
    """Reorder the last dimension to [first of each pair | second of each pair | rest]."""
    if layout != "adjacent":
        return x
    return torch.cat([*split_pairs(x, num_pairs, layout), x[..., 2 * num_pairs :]], dim=-1)


def from_canonical(x: Tensor, num_pairs: int, layout: Layout | None) -> Tensor:
    """Undo to_canonical."""
    if layout != "adjacent":
        return x
    first, second = x[..., :num_pairs], x[..., num_pairs : 2 * num_pairs]
    return joined_pairs(first, second, x[..., 2 * num_pairs :], layout)


TANGENTS = "trisect_tangents"  # what calibration differentiates, forwards and backwards: calibrate/attended.py
Attended = tuple[Tensor, Tensor | None]  # head outputs (b, t, h, vo), and attention weights where there are some


def function_name(asked: str, *, device: torch.device, capped: bool = False) -> str:
    """The name of the attention function to use: transformers' own, or ours where that one is slow or wrong."""
    if asked == "sdpa" and capped:
        return "eager"  # torch's fused attention cannot bound its scores
    ours = "flash" if "flash" in asked else asked if asked in ("vllm", "sglang", "sdpa") else None
    plain = ours is None or (ours == "sdpa" and device.type not in ("cpu", "cuda"))
    return asked if plain else f"trisect_{ours}"


def _sdpa(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Attended:
    """Our way through torch's fused attention, for `attn_implementation="sdpa"`."""
    causal = module.is_causal if kwargs.get("is_causal") is None else kwargs["is_causal"]
    dropout, sinks = kwargs.get("dropout", 0.0), kwargs.get("s_aux")
    return sdpa(q, k, v, mask, scale=kwargs["scaling"], dropout=dropout, causal=bool(causal), sinks=sinks), None


def _flash(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Attended:
    """Flash attention takes one width: transformers pads values up to keys, but cuts wider ones off."""
    attend, width = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation], max(q.shape[-1], v.shape[-1])
    out, weights = attend(module, *(padded(x, width) for x in (q, k, v)), *args, **kwargs)
    return out[..., : v.shape[-1]], weights


def _vllm(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Attended:
    """Keys and values as wide as in vLLM's cache, which its layer `attn` knows; it puts out rows of all heads."""
    layer, vo = module.attn, v.shape[-1]
    q, k, v = padded(q, layer.head_size), padded(k, layer.head_size), padded(v, layer.head_size_v)
    if layer.head_size_v == layer.head_size:
        out, _ = ALL_ATTENTION_FUNCTIONS["vllm"](module, q, k, v, *args, **kwargs)
    else:  # vLLM's own function would make values as wide as keys
        out = layer(*(x.transpose(1, 2).flatten(2).squeeze(0) for x in (q, k, v)))
    return out.view(1, -1, q.shape[1], layer.head_size_v)[..., :vo], None


def _sglang(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Attended:
    """The same in SGLang, whose cache has the dense width in every layer."""
    width, vo = kwargs["attention_instances"][module.layer_idx].head_dim, v.shape[-1]
    wide = [padded(x, width) for x in (q, k, v)]
    out, _ = ALL_ATTENTION_FUNCTIONS["sglang"](module, *wide, *args, **kwargs)
    return out.view(1, -1, q.shape[1], width)[..., :vo], None


for _name, _function in (("sdpa", _sdpa), ("flash", _flash), ("vllm", _vllm), ("sglang", _sglang)):
    ALL_ATTENTION_FUNCTIONS.register(f"trisect_{_name}", _function)


def eager(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Attended:
    """Attention spelt out, for `attn_implementation="eager"`: the reference for every other kernel."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    weights = attention_weights(module, q, k, mask, **kwargs)
    weights = nn.functional.dropout(weights, p=kwargs.get("dropout", 0.0), training=module.training)
    return (weights @ v).transpose(1, 2).contiguous(), weights


def attention_weights(module: Any, q: Tensor, k: Tensor, mask: Tensor | None, **kwargs: Any) -> Tensor:
    """Who looks at whom (b, h, t, keys), of as many keys as queries."""
    scores = softcapped(q @ k.mT * kwargs["scaling"], kwargs.get("softcap"))
    if mask is None and module.is_causal and q.shape[-2] > 1:  # what SDPA knows by itself
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(k.shape[-2] - q.shape[-2])
    if mask is not None:
        mask = mask[..., : k.shape[-2]]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    sinks = kwargs.get("s_aux")
    if sinks is not None:  # one more key, of value zero
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)], dim=-1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    return nn.functional.softmax(scores, dim=-1, dtype=wide).to(q.dtype)[..., : k.shape[-2]]


def softcapped(scores: Tensor, bound: float | None) -> Tensor:
    """Scores between -bound and bound: c tanh(score / c)."""
    return scores if bound is None else torch.tanh(scores / bound) * bound


def biased_mask(position_bias: Tensor, mask: Tensor | None, *, key_length: int) -> Tensor:
    """ALiBi's bias (h, 1, longest) for the keys at hand, and minus infinity where `mask` is set."""
    bias = position_bias[..., -key_length:].unsqueeze(0)  # (1, h, 1, keys)
    if mask is None:
        return bias
    return torch.where(mask[..., :key_length], torch.finfo(bias.dtype).min, bias)
