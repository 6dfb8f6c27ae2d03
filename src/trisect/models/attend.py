"""Attention functions by transformers' names for them, with ours in place of those that are slow or wrong."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trisect.kernels.sdpa import padded, sdpa


def interface(name: str, *, device: torch.device) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function transformers has under a name, or ours where that one is slow or wrong."""
    found: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    if found is sdpa_attention_forward and device.type in ("cpu", "cuda"):
        return _fused
    if "flash" in name:
        return partial(_equalled, found)
    return found


def _fused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Our way through torch's fused attention, for `attn_implementation="sdpa"`."""
    causal = module.is_causal if is_causal is None else is_causal
    out = sdpa(query, key, value, attention_mask, scale=scaling, dropout=dropout, causal=bool(causal))
    return out, None


def _equalled(
    attend: Callable[..., tuple[Tensor, Tensor | None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Flash attention takes one width: transformers pads values up to keys, but cuts wider ones off."""
    width = max(query.shape[-1], value.shape[-1])
    return attend(module, *(padded(x, width) for x in (query, key, value)), *args, **kwargs)


def eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention spelt out, for `attn_implementation="eager"`: the reference for every other kernel."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = query @ key.mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[-2]]
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights
