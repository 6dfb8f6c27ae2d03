"""Attention and cache writes of one new token per text, as custom operators with plain twins.

`torch.ops.trisect.attend_one` and `torch.ops.trisect.rotate_write_`; the functions below say what they take.

b = batch, h = query heads, k = key/value heads, l = slots of the cache
"""

from typing import Any

import torch
from torch import Tensor

from trisect.kernels.operators import choice, has_triton, register
from trisect.kernels.rotary import ANGLES, plain_rotation, readable
from trisect.kernels.sdpa import one_query


def wants_decode_kernel(q: Tensor) -> bool:
    """Whether single tokens go through the operators below, compiled or not."""
    chosen = choice("decode")
    if chosen == "auto":
        return q.is_cuda and has_triton() and q.dtype in (torch.bfloat16, torch.float16)
    return chosen == "kernel"


def _attend_one(
    q: Tensor, keys: Tensor, values: Tensor, start: Tensor | None, stop: Tensor, scale: float, window: int | None
) -> Tensor:
    """q (b, h, 1, qk) over the slots `start` (b,) to `stop` (1,) of a cache (b, k, l, ..): (b, 1, h, vo)."""
    if q.is_cuda and has_triton():
        from trisect.kernels.triton_decode import launch_attend

        return launch_attend(q, keys, values, start, stop, scale=scale, window=window)
    slot = torch.arange(keys.shape[2], device=q.device)
    visible = (slot <= stop) & (slot > stop - (keys.shape[2] if window is None else window))
    if start is not None:
        visible = visible & (slot >= start[:, None])
    mask = visible.expand(q.shape[0], -1)[:, None, None]  # (b, 1, 1, l)
    return one_query(q, keys, values, mask, scale=scale).contiguous()


def _rotate_write(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot: Tensor, *how: Any) -> None:
    """Turn q (b, 1, h, qk) in place; write turned k (b, 1, k, qk) and v (b, 1, k, vo) into a slot (1,)."""
    *angles, pairs, adjacent = how
    if q.is_cuda and has_triton():
        from trisect.kernels.triton_decode import launch_write

        angles[:2] = readable(*angles[:2])
        launch_write(q, k, v, keys, values, slot, *angles, pairs=pairs, adjacent=adjacent)
        return
    turned, key = plain_rotation(q, k, *angles, layout="adjacent" if adjacent else "half")
    q.copy_(turned)
    keys.index_copy_(2, slot, key.transpose(1, 2))
    values.index_copy_(2, slot, v.transpose(1, 2))


register(
    "attend_one",
    "(Tensor q, Tensor keys, Tensor values, Tensor? start, Tensor stop, float scale, SymInt? window) -> Tensor",
    _attend_one,
    fake=lambda q, keys, values, *_: q.new_empty(q.shape[0], 1, q.shape[1], values.shape[3]),
)
register(
    "rotate_write_",
    "(Tensor(a0!) q, Tensor k, Tensor v, Tensor(a3!) keys, Tensor(a4!) values, Tensor slot, "
    f"{ANGLES}, SymInt pairs, bool adjacent) -> ()",
    _rotate_write,
)
