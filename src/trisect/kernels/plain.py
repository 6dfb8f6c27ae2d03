"""Rotation of query and key pairs in plain torch: the twin of the Triton kernel, and its reference.

b = batch, t = tokens, k = key heads, g = queries per key, n = the model's frequencies, p = a head's pairs
"""

import math
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["half", "adjacent"]
"""Which channels make a pair: (i, i + p) of the first 2p, or (2i, 2i + 1)."""


def head_angles(cos: Tensor, sin: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines (b, t, k, p) that each key head rotates by; k = 1 when all heads share them.

    `cos`, `sin` are the model's own (b, t, 2 n), every frequency twice, so that any RoPE scaling the
    checkpoint uses is already inside. `index` (k, p) names the frequencies a head has kept.
    """
    n = cos.shape[-1] // 2
    cos, sin = cos[..., :n], sin[..., :n]
    if index is None:
        return cos.unsqueeze(-2), sin.unsqueeze(-2)
    places = index.flatten()
    cos, sin = (x.index_select(-1, places).unflatten(-1, index.shape) for x in (cos, sin))
    return cos, sin


def rate_angles(rates: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (b, t, k, p) of rates (k, p) at positions (b, t), in float32.

    The product of two float32 numbers is exact in float64. In float32 it would be off by up to 0.004 radians
    at position 100,000, the same for every token near it, and scores depend on differences of such angles.
    """
    turns = positions[..., None, None].double() * rates.double() * (0.5 / math.pi)
    angles = (turns - torch.floor(turns + 0.5)).float() * (2 * math.pi)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Rotate the leading pairs of the last dimension; channels beyond them pass.

    A table wider than `x` is what the arithmetic is done in: one rounding, at the end.
    """
    p = cos.shape[-1]
    first, second = split_pairs(x, p, layout)
    turned = first * cos - second * sin, second * cos + first * sin
    return joined_pairs(turned[0].to(x.dtype), turned[1].to(x.dtype), x[..., 2 * p :], layout)


def rotate_heads(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: Layout, *, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Queries (b, t, h, d) and keys (b, t, k, d) turned by the angles (b, t, k or 1, p) of their key head."""
    if inverse:
        sin = -sin
    groups = q.unflatten(2, (k.shape[2], -1))  # (b, t, h, d) -> (b, t, k, g, d)
    turned = rotate(groups, cos.unsqueeze(-2), sin.unsqueeze(-2), layout).flatten(2, 3)
    return turned, rotate(k, cos, sin, layout)


def split_pairs(x: Tensor, p: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """First and second channel of each of the leading `p` pairs."""
    if layout == "half":
        return x[..., :p], x[..., p : 2 * p]
    return x[..., 0 : 2 * p : 2], x[..., 1 : 2 * p : 2]


def joined_pairs(first: Tensor, second: Tensor, rest: Tensor, layout: Layout) -> Tensor:
    """Undo split_pairs, `rest` behind."""
    if layout == "half":
        return torch.cat([first, second, rest], dim=-1)
    return torch.cat([torch.stack([first, second], dim=-1).flatten(-2), rest], dim=-1)
