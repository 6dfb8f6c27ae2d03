# Kernels have no types of Python: their arguments are pointers and numbers on the device.
# mypy: disable-error-code="no-untyped-def, assignment"
"""The rotary kernel: queries and keys of a layer in one launch, each key head at its own frequencies.

One program turns a few tokens of a few neighbouring key heads and of the queries that share them: a row of
its tiles is one token of one head. Heads are read where the projection left them, whatever their strides, and
may be written back to the same place. Memory is what this waits for, so what is far away is asked for first:
the heads, then what says how to turn them, and nothing is written before the next heads are on their way.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SHARED, INDEXED, RATES = 0, 1, 2  # angles from one table for all heads, a table and an index per head, rates per head

MULTIPROCESSORS = 132  # of the GPU the block sizes are chosen for; elsewhere they are merely reasonable


class Blocks(NamedTuple):
    """What a program does at once: tokens times key heads, which must divide the number of key heads."""

    # Not more warps than its tiles have work for: the idle ones would repeat what others do, and in place might
    # read what those have written.

    tokens: int
    heads: int
    warps: int
    ahead: int = 5  # how many heads (queries of a group and their key) are read before the first is written
    early: bool = True  # whether heads are asked for before anything else; otherwise the assembler decides


@triton.jit
def rotate_kernel(
    q, k, q_out, k_out, cos, sin, index, rates, positions,
    tokens, length,
    q_b, q_t, k_b, k_t, qo_b, qo_t, ko_b, ko_t, a_b, a_t,
    q_h: tl.constexpr, k_h: tl.constexpr, qo_h: tl.constexpr, ko_h: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr,
    REST: tl.constexpr, REST_PAD: tl.constexpr,
    ADJACENT: tl.constexpr, INVERSE: tl.constexpr, ANGLES: tl.constexpr,
    ALIGN: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # Neighbouring rows and programs have neighbouring heads of a token: what is read at one time lies close
    # together in memory, and the heads of a program find their token's angles in the nearest cache.
    program = tl.program_id(0)
    row = tl.arange(0, TOKENS * HEADS)
    head = (program % (KV_HEADS // HEADS)) * HEADS + row % HEADS
    token = (program // (KV_HEADS // HEADS)) * TOKENS + row // HEADS
    live = token < tokens
    text, place = (token // length).to(tl.int64), (token % length).to(tl.int64)

    q_row = tl.multiple_of(text * q_b + place * q_t + head * (GROUP * q_h), ALIGN)
    k_row = tl.multiple_of(text * k_b + place * k_t + head * k_h, ALIGN)
    held = ()
    for item in tl.static_range(AHEAD):
        if item < GROUP:
            held = held + (read(q + item * q_h, q_row, live, PAIRS, PAIRS_PAD, ADJACENT),)
        else:
            held = held + (read(k, k_row, live, PAIRS, PAIRS_PAD, ADJACENT),)
    if EARLY:
        # Otherwise the assembler puts these loads off until their values are needed, to save registers.
        tl.debug_barrier()
    c, s = turning(
        cos, sin, index, rates, positions, head, text * a_b + place * a_t, live,
        PAIRS, PAIRS_PAD, INVERSE, ANGLES,
    )  # fmt: skip

    qo_row = tl.multiple_of(text * qo_b + place * qo_t + head * (GROUP * qo_h), ALIGN)
    ko_row = tl.multiple_of(text * ko_b + place * ko_t + head * ko_h, ALIGN)
    for item in tl.static_range(GROUP + 1):
        if item + AHEAD < GROUP:
            held = held + (read(q + (item + AHEAD) * q_h, q_row, live, PAIRS, PAIRS_PAD, ADJACENT),)
        elif item + AHEAD == GROUP:
            held = held + (read(k, k_row, live, PAIRS, PAIRS_PAD, ADJACENT),)
        if item < GROUP:
            target, target_row = q_out + item * qo_h, qo_row
            passed(q + item * q_h, q_row, target, target_row, live, PAIRS, REST, REST_PAD)
        else:
            target, target_row = k_out, ko_row
            passed(k, k_row, target, target_row, live, PAIRS, REST, REST_PAD)
        write(held[item], target, target_row, c, s, live, PAIRS, PAIRS_PAD, ADJACENT)


@triton.jit
def turn(
    source, source_row, target, target_row, c, s, live,
    PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
    ADJACENT: tl.constexpr,
):  # fmt: skip
    """Rotate one head of each row; `REST` channels behind the pairs are copied, if there are any."""
    x = read(source, source_row, live, PAIRS, PAIRS_PAD, ADJACENT)
    passed(source, source_row, target, target_row, live, PAIRS, REST, REST_PAD)
    write(x, target, target_row, c, s, live, PAIRS, PAIRS_PAD, ADJACENT)


@triton.jit
def read(source, row, live, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, ADJACENT: tl.constexpr):
    """The channels that rotate, in the type they are stored in: one tile if adjacent, else two halves."""
    if ADJACENT:
        both = tl.arange(0, 2 * PAIRS_PAD)
        mask = live[:, None] & (both[None, :] < 2 * PAIRS)
        return (tl.load(source + row[:, None] + both[None, :], mask=mask, other=0.0),)
    else:
        pair = tl.arange(0, PAIRS_PAD)
        mask = live[:, None] & (pair[None, :] < PAIRS)
        at = row[:, None] + pair[None, :]
        return (tl.load(source + at, mask=mask, other=0.0), tl.load(source + PAIRS + at, mask=mask, other=0.0))


@triton.jit
def write(
    x, target, row, c, s, live, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, ADJACENT: tl.constexpr
):  # fmt: skip
    """Rotate what `read` has found, and store it."""
    if ADJACENT:
        first, second = tl.split(tl.reshape(x[0], (x[0].shape[0], PAIRS_PAD, 2)))
    else:
        first, second = x
    first, second = first.to(tl.float32), second.to(tl.float32)
    # Said outright: which of two products a compiler fuses with their sum varies from one kernel to the next.
    left = tl.fma(first, c, -(second * s)).to(target.dtype.element_ty)
    right = tl.fma(second, c, first * s).to(target.dtype.element_ty)
    if ADJACENT:
        both = tl.arange(0, 2 * PAIRS_PAD)
        mask = live[:, None] & (both[None, :] < 2 * PAIRS)
        out = tl.reshape(tl.join(left, right), (left.shape[0], 2 * PAIRS_PAD))
        tl.store(target + row[:, None] + both[None, :], out, mask=mask)
    else:
        pair = tl.arange(0, PAIRS_PAD)
        mask = live[:, None] & (pair[None, :] < PAIRS)
        at = row[:, None] + pair[None, :]
        tl.store(target + at, left, mask=mask)
        tl.store(target + PAIRS + at, right, mask=mask)


@triton.jit
def passed(
    source, source_row, target, target_row, live,
    PAIRS: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
):  # fmt: skip
    """Copy the channels behind the pairs."""
    if REST > 0:
        rest = tl.arange(0, REST_PAD)
        mask = live[:, None] & (rest[None, :] < REST)
        x = tl.load(source + 2 * PAIRS + source_row[:, None] + rest[None, :], mask=mask, other=0.0)
        tl.store(target + 2 * PAIRS + target_row[:, None] + rest[None, :], x, mask=mask)


@triton.jit
def turning(
    cos, sin, index, rates, positions, head, row, live,
    PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, INVERSE: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    """Cosines and sines (rows, pairs); `head` is one or one per row, `row` its place among the angles."""
    pair = tl.arange(0, PAIRS_PAD)
    own = head * PAIRS + tl.zeros_like(live.to(tl.int32))
    mask = live[:, None] & (pair[None, :] < PAIRS)
    if ANGLES == 2:
        bits = tl.load(rates + own[:, None] + pair[None, :], mask=mask, other=0)
        position = tl.load(positions + row, mask=live, other=0)
        c, s = rotation(position[:, None], bits.to(tl.float32, bitcast=True))
    elif ANGLES == 1:
        # Transposed: where nothing is known of addresses, Triton gives neighbouring threads neighbours in the
        # first dimension. These are pairs of one token here, whose angles lie in one line of the cache, and
        # the transpose is laid out like the heads: nothing has to move from thread to thread.
        mask = live[None, :] & (pair[:, None] < PAIRS)
        place = tl.load(index + own[None, :] + pair[:, None], mask=mask, other=0).to(tl.int32)
        c = tl.trans(tl.load(cos + row[None, :] + place, mask=mask, other=0.0)).to(tl.float32)
        s = tl.trans(tl.load(sin + row[None, :] + place, mask=mask, other=0.0)).to(tl.float32)
    else:
        at = row[:, None] + pair[None, :]
        c = tl.load(cos + at, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + at, mask=mask, other=0.0).to(tl.float32)
    if INVERSE:
        s = -s
    return c, s


@triton.jit
def rotation(position, rate):
    """Cosine and sine of position times rate, within 2e-7 for the angle as float64 has it.

    Whole and half turns are taken off in float64: beside so large a number only halves are left, the last bit
    says whether their number is odd, and then both signs change. What remains is at most a quarter of a turn,
    where polynomials are short: best fits of sin(2 pi x) and cos(2 pi x), off by less than 1e-8.
    """
    turns, rate = position.to(tl.float64) * 0.15915494309189535, rate.to(tl.float64)
    large = 3377699720527872.0  # 1.5 times 2 to the 51st
    halves = tl.fma(turns, rate, tl.full((1, 1), large, tl.float64))
    x = tl.fma(turns, rate, large - halves).to(tl.float32)
    flip = halves.to(tl.int64, bitcast=True).to(tl.int32) << 31
    z = x * x
    p = tl.fma(tl.fma(tl.fma(z, 39.942307, -76.60961), z, 81.604004), z, -41.341713)
    s = tl.fma(x * z, p, x * 6.2831855)
    p = tl.fma(tl.fma(tl.fma(z, -25.006796, 60.148205), z, -85.45383), z, 64.939354)
    c = tl.fma(tl.fma(p, z, -19.739208), z, 1.0)
    c = (c.to(tl.int32, bitcast=True) ^ flip).to(tl.float32, bitcast=True)
    return c, (s.to(tl.int32, bitcast=True) ^ flip).to(tl.float32, bitcast=True)


def launch(
    q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor,
    cos: Tensor | None, sin: Tensor | None, index: Tensor | None,
    rates: Tensor | None, positions: Tensor | None,
    *, pairs: int, adjacent: bool, inverse: bool, blocks: Blocks | None = None,
) -> None:  # fmt: skip
    """Rotate q (b, t, h, d) and k (b, t, k, d) into `q_out` and `k_out`, which may be q and k themselves."""
    batch, length, heads, width = q.shape
    kv_heads, tokens = k.shape[2], batch * length
    if tokens == 0:
        return
    angles = positions if rates is not None else cos
    assert angles is not None
    blocks = blocks or chosen_blocks(tokens, kv_heads, pairs, q.element_size(), rates=rates is not None)
    assert kv_heads % blocks.heads == 0, f"blocks of {blocks.heads} heads among {kv_heads}"
    rest = 0 if q_out.data_ptr() == q.data_ptr() else width - 2 * pairs
    tensors = (q, k, q_out, k_out)
    group = heads // kv_heads
    rotate_kernel[(triton.cdiv(tokens, blocks.tokens) * (kv_heads // blocks.heads),)](
        # Pointers that are not read in this case must still be pointers.
        *tensors, *(x if x is not None else q for x in (cos, sin, index, rates, positions)),
        tokens, length,
        *(stride for x in tensors for stride in x.stride()[:2]),
        angles.stride(0) if angles.shape[0] > 1 else 0, angles.stride(1),
        *(x.stride(2) for x in tensors),
        KV_HEADS=kv_heads, GROUP=group, PAIRS=pairs, PAIRS_PAD=triton.next_power_of_2(pairs),
        REST=rest, REST_PAD=triton.next_power_of_2(max(rest, 1)),
        ADJACENT=adjacent, INVERSE=inverse,
        ANGLES=RATES if rates is not None else SHARED if index is None else INDEXED,
        ALIGN=_alignment(tensors), TOKENS=blocks.tokens, HEADS=blocks.heads,
        AHEAD=min(blocks.ahead, group + 1), EARLY=blocks.early, num_warps=blocks.warps,
    )  # fmt: skip


def chosen_blocks(tokens: int, kv_heads: int, pairs: int, itemsize: int = 2, *, rates: bool = False) -> Blocks:
    """Sixteen bytes of each half per thread for long texts; many small programs for single tokens."""
    # Reading heads before all else pays where angles are computed meanwhile (`rates`); where they are looked
    # up, it does not (docs/log.md).
    pad = triton.next_power_of_2(pairs)
    by_warp = max(1, 32 * 16 // itemsize // pad)  # rows
    heads = min(8, kv_heads & -kv_heads)
    block = max(1, min(64, 4 * by_warp) // heads)
    while block * heads > 1 and triton.cdiv(tokens, block) * (kv_heads // heads) < 4 * MULTIPROCESSORS:
        block, heads = (block // 2, heads) if block > 1 else (1, heads // 2)
    return Blocks(block, heads, max(1, min(4, block * heads // by_warp)), early=rates)


def _alignment(tensors: tuple[Tensor, ...]) -> int:
    """The largest power of two up to 16 that every row and head starts at a multiple of, in elements."""
    align = 16
    while align > 1 and any(stride % align for x in tensors for stride in x.stride()[:3]):
        align //= 2
    return align


def fits(q: Tensor, k: Tensor, pairs: int) -> bool:
    """Whether the kernel takes these heads: on a GPU, 16 or 32 bits, channels side by side."""
    known = q.dtype in (torch.bfloat16, torch.float16, torch.float32) and q.dtype == k.dtype
    return q.is_cuda and known and pairs > 0 and q.stride(-1) == 1 and k.stride(-1) == 1
