"""Attention functions: transformers' own under their names, and ours where those are slow or wrong.

b = batch, t = tokens, h = query heads, k = key/value heads
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trisect.kernels.sdpa import padded, sdpa

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
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
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
    weights = nn.functional.softmax(scores, dim=-1, dtype=wide).to(q.dtype)[..., : k.shape[-2]]
    weights = nn.functional.dropout(weights, p=kwargs.get("dropout", 0.0), training=module.training)
    return (weights @ v).transpose(1, 2).contiguous(), weights


def softcapped(scores: Tensor, bound: float | None) -> Tensor:
    """Scores between -bound and bound: c tanh(score / c)."""
    return scores if bound is None else torch.tanh(scores / bound) * bound


def biased_mask(position_bias: Tensor, mask: Tensor | None, *, key_length: int) -> Tensor:
    """ALiBi's bias (h, 1, longest) for the keys at hand, and minus infinity where `mask` is set."""
    bias = position_bias[..., -key_length:].unsqueeze(0)  # (1, h, 1, keys)
    if mask is None:
        return bias
    return torch.where(mask[..., :key_length], torch.finfo(bias.dtype).min, bias)
