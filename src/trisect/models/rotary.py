"""Rotation of query and key pairs at each key head's own frequencies.

b = batch, t = tokens, k = key heads, g = queries per key, n = the model's frequencies, p = a head's pairs
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Layout = Literal["half", "adjacent"]


def head_angles(cos: Tensor, sin: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines (b, t, k, p) that each key head rotates by; k = 1 when all heads share them.

    `cos`, `sin` are the model's own (b, t, 2 n), every frequency twice, so that any RoPE scaling the
    checkpoint uses is already inside. `index` (k, p) names the frequencies a head has kept.
    """
    n = cos.shape[-1] // 2
    cos, sin = cos[..., :n], sin[..., :n]
    if index is None:
        return cos.unsqueeze(-2), sin.unsqueeze(-2)
    return cos[..., index], sin[..., index]


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


def stored_rates(rates: Tensor) -> Tensor:
    """Rates as the bits of float32: `model.to(bfloat16)` casts every floating buffer, and would ruin them."""
    return rates.float().contiguous().view(torch.int32)


def loaded_rates(stored: Tensor) -> Tensor:
    """Undo stored_rates."""
    return stored.view(torch.float32)


def rate_angles(rates: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (b, t, k, p) of rates (k, p) at positions (b, t), in float32."""
    angles = positions[..., None, None].float() * rates
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Rotate the leading pairs of the last dimension; channels beyond them pass."""
    p = cos.shape[-1]
    first, second = _pairs(x, p, layout)
    turned = first * cos - second * sin, second * cos + first * sin
    return _joined(*turned, x[..., 2 * p :], layout)


def to_canonical(x: Tensor, num_pairs: int, layout: Layout | None) -> Tensor:
    """Reorder the last dimension to [first of each pair | second of each pair | rest]."""
    if layout != "adjacent":
        return x
    return torch.cat([*_pairs(x, num_pairs, layout), x[..., 2 * num_pairs :]], dim=-1)


def from_canonical(x: Tensor, num_pairs: int, layout: Layout | None) -> Tensor:
    """Undo to_canonical."""
    if layout != "adjacent":
        return x
    first, second = x[..., :num_pairs], x[..., num_pairs : 2 * num_pairs]
    return _joined(first, second, x[..., 2 * num_pairs :], layout)


def _pairs(x: Tensor, p: int, layout: Layout) -> tuple[Tensor, Tensor]:
    if layout == "half":
        return x[..., :p], x[..., p : 2 * p]
    return x[..., 0 : 2 * p : 2], x[..., 1 : 2 * p : 2]


def _joined(first: Tensor, second: Tensor, rest: Tensor, layout: Layout) -> Tensor:
    if layout == "half":
        return torch.cat([first, second, rest], dim=-1)
    return torch.cat([torch.stack([first, second], dim=-1).flatten(-2), rest], dim=-1)
