"""Rotations of queries and keys: their rates, and the order of channels."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trisect.kernels.rotary import Layout, joined_pairs, split_pairs

STATIC_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Kinds of RoPE whose frequencies do not change with the length of the text."""


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
