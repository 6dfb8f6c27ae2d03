"""One launch between projections and attention at decode: queries turned, keys and values into the cache.

One program has one text and one key head with the queries that share it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trisect.kernels.triton_rotary import INDEXED, MULTIPROCESSORS, RATES, SHARED, turn, turning

# Kernels have no types of Python: their arguments are pointers and numbers on the device.
# mypy: disable-error-code=no-untyped-def


class Tiles(NamedTuple):
    """How the work is cut: slots read at once, programs per text and key head, warps, loads in flight."""

    block: int
    splits: int
    warps: int = 4
    stages: int = 3


@triton.jit
def attend_kernel(
    q, keys, values, start, stop, out, peaks, sums,
    scale, window,
    q_b, q_h, keys_b, keys_h, keys_s, values_b, values_h, values_s,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    QK: tl.constexpr, QK_PAD: tl.constexpr, VO: tl.constexpr, VO_PAD: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, HAS_START: tl.constexpr,
):  # fmt: skip
    pair, split = tl.program_id(0), tl.program_id(1)
    text, head = pair // KV_HEADS, pair % KV_HEADS
    end = tl.load(stop).to(tl.int32) + 1  # the slot of the newest token
    begin = tl.maximum(end - window, 0)
    if HAS_START:
        begin = tl.maximum(begin, tl.load(start + text).to(tl.int32))
    share = tl.cdiv(tl.cdiv(end - begin, SPLITS), BLOCK) * BLOCK
    low = begin + split * share
    high = tl.minimum(low + share, end)

    member, channel, output = tl.arange(0, GROUP_PAD), tl.arange(0, QK_PAD), tl.arange(0, VO_PAD)
    wanted = (member[:, None] < GROUP) & (channel[None, :] < QK)
    q_at = text.to(tl.int64) * q_b + (head * GROUP + member[:, None]) * q_h + channel[None, :]
    query = tl.load(q + q_at, mask=wanted, other=0.0)
    keys += text.to(tl.int64) * keys_b + head.to(tl.int64) * keys_h
    values += text.to(tl.int64) * values_b + head.to(tl.int64) * values_h

    peak = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.full((GROUP_PAD,), 0.0, tl.float32)
    mixed = tl.full((GROUP_PAD, VO_PAD), 0.0, tl.float32)
    for first in tl.range(low, high, BLOCK, num_stages=STAGES):
        slot = first + tl.arange(0, BLOCK)
        there = slot < high
        key = tl.load(
            keys + slot.to(tl.int64)[:, None] * keys_s + channel[None, :],
            mask=there[:, None] & (channel[None, :] < QK), other=0.0,
        )  # fmt: skip
        value = tl.load(
            values + slot.to(tl.int64)[:, None] * values_s + output[None, :],
            mask=there[:, None] & (output[None, :] < VO), other=0.0,
        )  # fmt: skip
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        score = tl.where(there[None, :], score * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, axis=1))
        weight = tl.exp(score - higher[:, None])
        shrink = tl.exp(peak - higher)
        total = total * shrink + tl.sum(weight, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        peak = higher

    real = member < GROUP
    row = (pair.to(tl.int64) * GROUP + member) * SPLITS + split
    # A split without slots has a sum of 0 and weighs nothing below.
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    kept = real[:, None] & (output[None, :] < VO)
    tl.store(out + row[:, None] * VO + output[None, :], mixed.to(out.dtype.element_ty), mask=kept)
    if SPLITS > 1:
        tl.store(peaks + row, peak, mask=real)
        tl.store(sums + row, total, mask=real)


@triton.jit
def merge_kernel(
    parts, peaks, sums, out,
    VO: tl.constexpr, VO_PAD: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """One text and query head: its splits, each weighed by its share of the softmax's denominator."""
    head = tl.program_id(0).to(tl.int64)
    split, channel = tl.arange(0, SPLITS_PAD), tl.arange(0, VO_PAD)
    row = head * SPLITS + split
    peak = tl.load(peaks + row, mask=split < SPLITS, other=float("-inf"))
    total = tl.load(sums + row, mask=split < SPLITS, other=0.0)
    weight = total * tl.exp(peak - tl.max(peak, axis=0))
    weight = tl.where(total > 0, weight, 0.0)
    weight = weight / tl.sum(weight, axis=0)
    mask = (split[:, None] < SPLITS) & (channel[None, :] < VO)
    part = tl.load(parts + row[:, None] * VO + channel[None, :], mask=mask, other=0.0)
    mixed = tl.sum(part * weight[:, None], axis=0)
    tl.store(out + head * VO + channel, mixed.to(out.dtype.element_ty), mask=channel < VO)


def launch_attend(
    q: Tensor, keys: Tensor, values: Tensor, start: Tensor | None, stop: Tensor,
    *, scale: float, window: int | None, tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """q (b, h, 1, qk) over keys (b, k, length, qk) and values (b, k, length, vo): (b, 1, h, vo)."""
    # Slots from `start` (b,) up to and with `stop` (1,) count, of these the last `window`.
    batch, heads, _, qk = q.shape
    kv_heads, length, vo = values.shape[1:]
    group = heads // kv_heads
    tiles = tiles or chosen_tiles(batch * kv_heads, length)
    out = torch.empty(batch, 1, heads, vo, dtype=q.dtype, device=q.device)
    split = tiles.splits > 1
    rows = batch * heads * tiles.splits if split else 0
    parts = torch.empty(rows * vo, dtype=torch.float32, device=q.device)
    peaks, sums = torch.empty(2, rows, dtype=torch.float32, device=q.device)
    attend_kernel[(batch * kv_heads, tiles.splits)](
        q, keys, values, stop if start is None else start, stop, parts if split else out, peaks, sums,
        scale, length if window is None else window,
        q.stride(0), q.stride(1), *keys.stride()[:3], *values.stride()[:3],
        KV_HEADS=kv_heads, GROUP=group,
        # Products on tensor cores start at 16 rows and channels.
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        QK=qk, QK_PAD=max(16, triton.next_power_of_2(qk)), VO=vo, VO_PAD=max(16, triton.next_power_of_2(vo)),
        SPLITS=tiles.splits, BLOCK=tiles.block, STAGES=tiles.stages, HAS_START=start is not None,
        num_warps=tiles.warps,
    )  # fmt: skip
    if split:
        merge_kernel[(batch * heads,)](
            parts, peaks, sums, out, VO=vo, VO_PAD=triton.next_power_of_2(vo),
            SPLITS=tiles.splits, SPLITS_PAD=triton.next_power_of_2(tiles.splits), num_warps=1,
        )  # fmt: skip
    return out


def chosen_tiles(pairs: int, length: int) -> Tiles:
    """Enough programs to fill the GPU twice, none with less than two blocks to read."""
    block = 64
    splits = 1
    while splits * pairs < 2 * MULTIPROCESSORS and 2 * splits * 2 * block <= length:
        splits *= 2
    return Tiles(block=block, splits=splits)


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
    turn(k + head * k_h, row * k_b, kept, row * keys_b, c, s, live, PAIRS, PAIRS_PAD, REST, REST_PAD, ADJACENT)
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
