# Kernels have no types of Python: their arguments are pointers and numbers on the device.
# mypy: disable-error-code=no-untyped-def
"""One launch between projections and attention at decode: queries turned, keys and values into the cache.

One program has one text and one key head with the queries that share it.
"""

import triton
import triton.language as tl
from torch import Tensor

from trisect.kernels.triton_rotary import INDEXED, RATES, SHARED, turn, turning


@triton.jit
def write_kernel(
    q, k, v, keys, values, slot, cos, sin, index, rates, positions,
    q_b, k_b, v_b, keys_b, keys_h, keys_s, values_b, values_h, values_s, a_b,
    q_h: tl.constexpr, k_h: tl.constexpr, v_h: tl.constexpr,
    GROUP: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr,
    REST: tl.constexpr, REST_PAD: tl.constexpr, VO: tl.constexpr, VO_PAD: tl.constexpr,
    ADJACENT: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    live = row >= 0
    c, s = turning(cos, sin, index, rates, positions, head, row * a_b, live, PAIRS, PAIRS_PAD, False, ANGLES)
    for member in tl.static_range(GROUP):
        query = q + (head * GROUP + member) * q_h
        # In place: channels beyond the pairs stay where they are.
        turn(query, row * q_b, query, row * q_b, c, s, live, PAIRS, PAIRS_PAD, 0, 1, ADJACENT)
    place = tl.load(slot).to(tl.int64)
    kept = keys + head.to(tl.int64) * keys_h + place * keys_s
    turn(
        k + head * k_h, row * k_b, kept, row * keys_b, c, s, live, PAIRS, PAIRS_PAD, REST, REST_PAD, ADJACENT
    )
    channel = tl.arange(0, VO_PAD)
    mask = live[:, None] & (channel[None, :] < VO)
    value = tl.load(v + head * v_h + (row * v_b)[:, None] + channel[None, :], mask=mask, other=0.0)
    kept = values + head.to(tl.int64) * values_h + place * values_s
    tl.store(kept + (row * values_b)[:, None] + channel[None, :], value, mask=mask)


def launch_write(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slot: Tensor,
    cos: Tensor | None, sin: Tensor | None, index: Tensor | None,
    rates: Tensor | None, positions: Tensor | None,
    *, pairs: int, adjacent: bool,
) -> None:  # fmt: skip
    """Turn q (b, 1, h, qk); k (b, 1, k, qk) and v (b, 1, k, vo) go into slot `slot` of (b, k, length, ..)."""
    batch, _, heads, width = q.shape
    kv_heads, vo = v.shape[2:]
    angles = positions if rates is not None else cos
    assert angles is not None
    rest = width - 2 * pairs
    write_kernel[(batch, kv_heads)](
        q, k, v, keys, values, slot,
        *(x if x is not None else q for x in (cos, sin, index, rates, positions)),
        q.stride(0), k.stride(0), v.stride(0), *keys.stride()[:3], *values.stride()[:3],
        angles.stride(0) if angles.shape[0] > 1 else 0,
        q.stride(2), k.stride(2), v.stride(2),
        GROUP=heads // kv_heads, PAIRS=pairs, PAIRS_PAD=triton.next_power_of_2(pairs),
        REST=rest, REST_PAD=triton.next_power_of_2(max(rest, 1)), VO=vo, VO_PAD=triton.next_power_of_2(vo),
        ADJACENT=adjacent, ANGLES=RATES if rates is not None else SHARED if index is None else INDEXED,
        num_warps=1,
    )  # fmt: skip
