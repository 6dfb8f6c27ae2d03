"""Attention of one new token per text, as a custom operator with a plain twin: `torch.ops.trisect.attend_one`.

b = batch, h = query heads, k = key/value heads, l = slots of the cache
"""

import torch
from torch import Tensor

from trisect.kernels.operators import choice, has_triton, register
from trisect.kernels.rotary import ANGLES, plain_rotation, readable
from trisect.kernels.sdpa import one_query


def wants_decode_kernel(q: Tensor) -> bool:
    """Whether single tokens go through the operator below, compiled or not."""
    chosen = choice("decode")
    if chosen == "auto":
        return q.is_cuda and has_triton() and q.dtype in (torch.bfloat16, torch.float16)
    return chosen == "kernel"


def _attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor | None,
    slot: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    index: Tensor | None,
    rates: Tensor | None,
    positions: Tensor | None,
    counters: Tensor,
    pairs: int,
    adjacent: bool,
    scale: float,
    window: int | None,
) -> Tensor:
    """Turn q (b, 1, h, qk) and k (b, 1, k, qk), put k and v (b, 1, k, vo) into `slot` (1,) of a cache (b, k, l, ..).

    What is returned is attention (b, 1, h, vo) over the slots from `start` (b,) to that one, of these the last
    `window`. `counters` are zeros (b * k,) before and afterwards, for programs that share a head.
    """
    if q.is_cuda and has_triton():
        from trisect.kernels.triton_decode import launch_attend

        angles = *readable(cos, sin), index, rates, positions
        how = {"pairs": pairs, "adjacent": adjacent, "scale": scale, "window": window}
        return launch_attend(q, k, v, keys, values, start, slot, *angles, counters, **how)  # type: ignore[arg-type]
    if pairs:
        layout = "adjacent" if adjacent else "half"
        q, k = plain_rotation(q, k, cos, sin, index, rates, positions, layout=layout)  # type: ignore[arg-type]
    keys.index_copy_(2, slot, k.transpose(1, 2))
    values.index_copy_(2, slot, v.transpose(1, 2))
    place = torch.arange(keys.shape[2], device=q.device)
    visible = (place <= slot) & (place > slot - (keys.shape[2] if window is None else window))
    if start is not None:
        visible = visible & (place >= start[:, None])
    mask = visible.expand(q.shape[0], -1)[:, None, None]  # (b, 1, 1, l)
    return one_query(q.transpose(1, 2), keys, values, mask, scale=scale).contiguous()


register(
    "attend_one",
    "(Tensor q, Tensor k, Tensor v, Tensor(a3!) keys, Tensor(a4!) values, Tensor? start, Tensor slot, "
    f"{ANGLES}, Tensor(a5!) counters, SymInt pairs, bool adjacent, float scale, SymInt? window) -> Tensor",
    _attend_one,
    fake=lambda q, k, v, *_: q.new_empty(*q.shape[:3], v.shape[3]),
)
