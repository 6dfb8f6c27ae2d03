"""Attention functions: transformers' own under their names, and ours where those are slow or wrong.

b = batch, t = tokens, h = query heads, k = key/value heads
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trisect.kernels.sdpa import padded, sdpa

Attended = tuple[Tensor, Tensor | None]
"""Head outputs (b, t, h, vo), and the attention weights where the function has them."""
Attend = Callable[..., Attended]
"""(module, query, key, value, mask, scaling=, dropout=, ...), as transformers calls attention functions."""


def interface(name: str, *, device: torch.device, capped: bool = False) -> Attend:
    """The attention function transformers has under a name, or ours where that one is slow or wrong."""
    found: Attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    if found is sdpa_attention_forward and (capped or device.type in ("cpu", "cuda")):
        return eager if capped else _sdpa  # torch's fused attention cannot bound its scores
    return partial(_flash, found) if "flash" in name else found


def _sdpa(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Attended:
    """Our way through torch's fused attention, for `attn_implementation="sdpa"`."""
    causal = module.is_causal if kwargs.get("is_causal") is None else kwargs["is_causal"]
    settings = {"scale": kwargs["scaling"], "dropout": kwargs.get("dropout", 0.0), "sinks": kwargs.get("s_aux")}
    return sdpa(q, k, v, mask, causal=bool(causal), **settings), None


def _flash(attend: Attend, module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Attended:
    """Flash attention takes one width: transformers pads values up to keys, but cuts wider ones off."""
    width = max(q.shape[-1], v.shape[-1])
    return attend(module, *(padded(x, width) for x in (q, k, v)), *args, **kwargs)


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
