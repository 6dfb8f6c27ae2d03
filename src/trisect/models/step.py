"""One new token per text on a decoder's fixed cache, through our operators instead of masks and copies.

b = batch, h = query heads
"""

from typing import Any

import torch
from torch import Tensor

from trisect.kernels import wants_decode_kernel


def steps_alone(attention: Any, cache: Any, q: Tensor) -> bool:
    """Whether queries (b, t, h, qk) of a layer go this way."""
    if not attention.prepared or attention.live is None:
        return False
    ours = getattr(cache, "clock", None) is attention.live.clock
    single = q.shape[1] == 1 and not attention.live.clock.prompt
    plain = attention.tap is None and attention.config._attn_implementation == "sdpa"
    return ours and single and plain and wants_decode_kernel(q)


def stepped(
    attention: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: tuple[Tensor, Tensor] | None,
    positions: Tensor | None,
) -> Tensor:
    """One new token per text (b, 1, heads, width): into the cache, and its attention (b, 1, h, vo)."""
    a, live, clock = attention, attention.live, attention.live.clock
    if a.num_pairs:
        cos, sin = (None, None) if table is None or a.rotary_rates is not None else table
        angles = cos, sin, a.rotary_index, a.rotary_rates, positions
        adjacent = a.family.rotary == "adjacent"
        torch.ops.trisect.rotate_write_(
            q, k, v, live.keys, live.values, clock.slot, *angles, a.num_pairs, adjacent
        )
    else:
        live.update(k.transpose(1, 2), v.transpose(1, 2))
    if a.family.position_scale:
        q = q * a.position_scale(positions, q.dtype)
    scale = float(getattr(a, a.family.scale))
    out: Tensor = torch.ops.trisect.attend_one(
        q.transpose(1, 2), live.keys, live.values, clock.start, clock.slot, scale, a.window
    )
    return out
