# Kernels have no types of Python: their arguments are pointers and numbers on the device.
# mypy: disable-error-code="no-untyped-def, assignment"
"""Attention of one new token per text: heads are turned, keys and values go into the cache, all in one launch.

One program has one text, one key head with the queries that share it, and a share of the slots. The first of
them also has the new token, which it takes from registers. The last one to come adds all shares up.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trisect.kernels.triton_product import early
from trisect.kernels.triton_rotary import INDEXED, MULTIPROCESSORS, RATES, SHARED, rotation


class Tiles(NamedTuple):
    """How the work is cut: slots read at once, programs per text and key head, warps, loads in flight."""

    block: int
    splits: int
    warps: int = 4
    stages: int = 3


@triton.jit
def attend_kernel(
    q, k, v, keys, values, start, slot, cos, sin, index, rates, positions,
    out, parts, peaks, sums, counters,
    scale, window,
    q_b, q_h, k_b, k_h, v_b, v_h, keys_b, keys_h, keys_s, values_b, values_h, values_s, a_b,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    QK: tl.constexpr, QK_1: tl.constexpr, QK_2: tl.constexpr,
    VO: tl.constexpr, VO_1: tl.constexpr, VO_2: tl.constexpr,
    PAIRS: tl.constexpr, ADJACENT: tl.constexpr, ANGLES: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, HAS_START: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    pair, split = tl.program_id(0), tl.program_id(1)
    text, head = (pair // KV_HEADS).to(tl.int64), (pair % KV_HEADS).to(tl.int64)
    end = tl.load(slot).to(tl.int32)  # the new token's slot
    begin = tl.maximum(end + 1 - window, 0)
    if HAS_START:
        begin = tl.maximum(begin, tl.load(start + text).to(tl.int32))
    share = tl.cdiv(tl.cdiv(end - begin, SPLITS), BLOCK) * BLOCK
    low = begin + split * share
    high = tl.minimum(low + share, end)
    keys += text * keys_b + head * keys_h
    values += text * values_b + head * values_h
    if EARLY:
        gdc_launch_dependents()
        if AHEAD > 0:
            early = tl.maximum(tl.minimum(low + tl.arange(0, AHEAD), high - 1), 0).to(tl.int64)
            bring(keys + early * keys_s, 2 * QK)
            bring(values + early * values_s, 2 * VO)
        gdc_wait()

    member = tl.arange(0, GROUP_PAD)
    turns = text * a_b
    q += text * q_b + head * GROUP * q_h
    k, v = k + text * k_b + head * k_h, v + text * v_b + head * v_h
    angles_1 = angles(cos, sin, index, rates, positions, head, turns, 0, QK_1, PAIRS, ADJACENT, ANGLES)
    query_1 = turned(q, q_h, member, GROUP, angles_1, 0, QK, QK_1, PAIRS, ADJACENT)
    if QK_2 > 0:
        angles_2 = angles(cos, sin, index, rates, positions, head, turns, QK_1, QK_2, PAIRS, ADJACENT, ANGLES)
        query_2 = turned(q, q_h, member, GROUP, angles_2, QK_1, QK, QK_2, PAIRS, ADJACENT)

    peak = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    mixed_1 = tl.zeros((GROUP_PAD, VO_1), tl.float32)
    if VO_2 > 0:
        mixed_2 = tl.zeros((GROUP_PAD, VO_2), tl.float32)
    if split == 0:
        one, place = tl.arange(0, 1), end.to(tl.int64)
        key = turned(k, k_h, one, 1, angles_1, 0, QK, QK_1, PAIRS, ADJACENT)
        put(key, keys + place * keys_s, 0, QK, QK_1)
        peak = tl.sum(query_1.to(tl.float32) * key.to(tl.float32), axis=1)
        if QK_2 > 0:
            key_2 = turned(k, k_h, one, 1, angles_2, QK_1, QK, QK_2, PAIRS, ADJACENT)
            put(key_2, keys + place * keys_s, QK_1, QK, QK_2)
            peak += tl.sum(query_2.to(tl.float32) * key_2.to(tl.float32), axis=1)
        peak *= scale
        total += 1.0
        value = part_of(v + tl.zeros((1,), tl.int32), 0, VO, VO_1)
        put(value, values + place * values_s, 0, VO, VO_1)
        mixed_1 += value.to(tl.float32)
        if VO_2 > 0:
            value_2 = part_of(v + tl.zeros((1,), tl.int32), VO_1, VO, VO_2)
            put(value_2, values + place * values_s, VO_1, VO, VO_2)
            mixed_2 += value_2.to(tl.float32)

    for first in tl.range(low, high, BLOCK, num_stages=STAGES):
        near = first + tl.arange(0, BLOCK)
        there = near < high
        # Beyond the last slot whatever is there weighs nothing, but must be a number.
        far = tl.minimum(near, high - 1).to(tl.int64)
        score = tl.dot(query_1, tl.trans(part_of(keys + far * keys_s, 0, QK, QK_1)), input_precision="ieee")
        if QK_2 > 0:
            rest = part_of(keys + far * keys_s, QK_1, QK, QK_2)
            score = tl.dot(query_2, tl.trans(rest), score, input_precision="ieee")
        value = part_of(values + far * values_s, 0, VO, VO_1)
        if VO_2 > 0:
            value_2 = part_of(values + far * values_s, VO_1, VO, VO_2)
        score = tl.where(there[None, :], score * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, axis=1))
        weight = tl.exp(score - higher[:, None])
        shrink = tl.exp(peak - higher)
        total = total * shrink + tl.sum(weight, axis=1)
        weight = weight.to(value.dtype)
        mixed_1 = tl.dot(weight, value, mixed_1 * shrink[:, None], input_precision="ieee")
        if VO_2 > 0:
            mixed_2 = tl.dot(weight, value_2, mixed_2 * shrink[:, None], input_precision="ieee")
        peak = higher

    rows = pair.to(tl.int64) * GROUP + member
    real = member < GROUP
    # A share without slots has a sum of 0 and weighs nothing below.
    over = 1.0 / tl.where(total > 0, total, 1.0)[:, None]
    target = out if SPLITS == 1 else parts
    each = rows if SPLITS == 1 else rows * SPLITS + split
    keep(mixed_1 * over, target, each, real, 0, VO, VO_1)
    if VO_2 > 0:
        keep(mixed_2 * over, target, each, real, VO_1, VO, VO_2)
    if SPLITS > 1:
        tl.store(peaks + each, peak, mask=real)
        tl.store(sums + each, total, mask=real)
        tl.debug_barrier()
        if tl.atomic_add(counters + pair, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(counters + pair, 0)
            for one_member in tl.static_range(GROUP):
                row = pair.to(tl.int64) * GROUP + one_member
                merge(parts, peaks, sums, out, row, 0, VO, VO_1, SPLITS)
                if VO_2 > 0:
                    merge(parts, peaks, sums, out, row, VO_1, VO, VO_2, SPLITS)


@triton.jit
def angles(
    cos, sin, index, rates, positions, head, row, FROM: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, ADJACENT: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    """Cosines and sines (1, channels) of the channels from FROM on: those of their pairs."""
    channel = FROM + tl.arange(0, WIDTH)[None, :]
    mask = channel < 2 * PAIRS
    pair = channel // 2 if ADJACENT else tl.where(channel < PAIRS, channel, channel - PAIRS)
    if ANGLES == 2:
        bits = tl.load(rates + head * PAIRS + pair, mask=mask, other=0)
        return rotation(tl.load(positions + row + tl.zeros_like(pair)), bits.to(tl.float32, bitcast=True))
    if ANGLES == 1:
        pair = tl.load(index + head * PAIRS + pair, mask=mask, other=0).to(tl.int32)
    c, s = tl.load(cos + row + pair, mask=mask, other=0.0), tl.load(sin + row + pair, mask=mask, other=0.0)
    return c.to(tl.float32), s.to(tl.float32)


@triton.jit
def turned(
    source, stride, member, COUNT: tl.constexpr, by, FROM: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, ADJACENT: tl.constexpr,
):  # fmt: skip
    """Heads (members, channels) turned, rounded once; channels behind the pairs as they are."""
    channel = FROM + tl.arange(0, WIDTH)[None, :]
    at = source + member[:, None] * stride
    mask = (member[:, None] < COUNT) & (channel < LIMIT)
    own = tl.load(at + channel, mask=mask, other=0.0)
    if PAIRS == 0:
        return own
    leads = channel % 2 == 0 if ADJACENT else channel < PAIRS
    step: tl.constexpr = 1 if ADJACENT else PAIRS
    turns = mask & (channel < 2 * PAIRS)
    other = tl.load(at + tl.where(leads, channel + step, channel - step), mask=turns, other=0.0).to(tl.float32)
    c, s = by
    result = tl.fma(own.to(tl.float32), c, tl.where(leads, -(other * s), other * s))
    return tl.where(turns, result.to(own.dtype), own)


@triton.jit
def part_of(rows, FROM: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr):
    """Some channels of rows."""
    channel = FROM + tl.arange(0, WIDTH)[None, :]
    if FROM + WIDTH <= LIMIT:
        return tl.load(rows[:, None] + channel)
    else:
        return tl.load(rows[:, None] + channel, mask=channel < LIMIT, other=0.0)


@triton.jit
def put(x, target, FROM: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr):
    """Write one row's channels."""
    channel = FROM + tl.arange(0, WIDTH)[None, :]
    tl.store(target + channel, x, mask=channel < LIMIT)


@triton.jit
def keep(x, target, rows, real, FROM: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr):
    """Write the channels of some rows of LIMIT."""
    channel = FROM + tl.arange(0, WIDTH)[None, :]
    at = target + rows[:, None] * LIMIT + channel
    tl.store(at, x.to(target.dtype.element_ty), mask=real[:, None] & (channel < LIMIT))


@triton.jit
def merge(
    parts, peaks, sums, out, row, FROM: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr
):
    """Some channels of one head: its shares, each weighed by its part of the softmax's denominator."""
    share = row * SPLITS + tl.arange(0, SPLITS)
    channel = FROM + tl.arange(0, WIDTH)[None, :]
    at = parts + share[:, None] * LIMIT + channel
    part = tl.load(at, mask=channel < LIMIT, other=0.0, cache_modifier=".cg")
    peak = tl.load(peaks + share, cache_modifier=".cg")
    total = tl.load(sums + share, cache_modifier=".cg")
    weight = tl.where(total > 0, total * tl.exp(peak - tl.max(peak, axis=0)), 0.0)
    mixed = tl.sum(part * (weight / tl.sum(weight, axis=0))[:, None], axis=0)[None, :]
    tl.store(out + row * LIMIT + channel, mixed.to(out.dtype.element_ty), mask=channel < LIMIT)


@triton.jit
def bring(rows, BYTES: tl.constexpr):
    """Bring rows into the L2 cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; // $0", "=r,l,r",
        [rows.to(tl.int64), tl.full((1,), BYTES, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


def launch_attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: Tensor | None, slot: Tensor,
    cos: Tensor | None, sin: Tensor | None, index: Tensor | None, rates: Tensor | None, positions: Tensor | None,
    counters: Tensor,
    *, pairs: int, adjacent: bool, scale: float, window: int | None, tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """q (b, 1, h, qk) over a cache (b, k, length, ..) whose `slot` (1,) gets k (b, 1, k, qk) and v: (b, 1, h, vo)."""
    # Slots from `start` (b,) up to and with `slot` count, of these the last `window`.
    batch, _, heads, qk = q.shape
    kv_heads, length, vo = values.shape[1:]
    group = heads // kv_heads
    tiles = tiles or chosen_tiles(batch * kv_heads, length)
    out = torch.empty(batch, 1, heads, vo, dtype=q.dtype, device=q.device)
    shares = batch * heads * tiles.splits if tiles.splits > 1 else 0
    space = torch.empty(shares * (vo + 2), dtype=torch.float32, device=q.device)
    by = positions if rates is not None else cos
    (qk_1, qk_2), (vo_1, vo_2) = in_powers(qk), in_powers(vo)
    rows_fit = all(width * q.element_size() % 16 == 0 for width in (qk, vo))
    attend_kernel[(batch * kv_heads, tiles.splits)](
        q, k, v, keys, values, slot if start is None else start, slot,
        *(x if x is not None else q for x in (cos, sin, index, rates, positions)),
        out, space[2 * shares :], space[:shares], space[shares : 2 * shares], counters,
        scale, length if window is None else window,
        *(stride for x in (q, k, v) for stride in (x.stride(0), x.stride(2))),
        *keys.stride()[:3], *values.stride()[:3], by.stride(0) if by is not None and by.shape[0] > 1 else 0,
        KV_HEADS=kv_heads, GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)),
        QK=qk, QK_1=qk_1, QK_2=qk_2, VO=vo, VO_1=vo_1, VO_2=vo_2, PAIRS=pairs, ADJACENT=adjacent,
        ANGLES=RATES if rates is not None else SHARED if index is None else INDEXED,
        SPLITS=tiles.splits, BLOCK=tiles.block, STAGES=tiles.stages, HAS_START=start is not None,
        AHEAD=32 * tiles.warps if rows_fit else 0, num_warps=tiles.warps, **early(q),
    )  # fmt: skip
    return out


def in_powers(width: int) -> tuple[int, int]:
    """Powers of two that hold a width, one or two: masked channels cost as much as real ones."""
    most = max(16, triton.next_power_of_2(width))
    rest = max(32, triton.next_power_of_2(max(width - most // 2, 1)))  # with 16, registers double
    return (most, 0) if rest >= most // 2 else (most // 2, rest)


def chosen_tiles(pairs: int, length: int) -> Tiles:
    """Enough programs to fill the GPU twice, none with less than two blocks to read."""
    block = 64
    splits = 1
    while splits * pairs < 2 * MULTIPROCESSORS and 2 * splits * 2 * block <= length:
        splits *= 2
    return Tiles(block=block, splits=splits)
