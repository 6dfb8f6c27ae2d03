# Kernels have no types of Python: their arguments are pointers and numbers on the device.
# mypy: disable-error-code=no-untyped-def
"""The rotary kernel: queries and keys of a layer in one launch, each key head at its own frequencies.

One program turns a block of tokens of one key head and of the queries that share it. Cosines and sines are
fetched (or made) once per program and stay in registers for all of these heads; rows are read where the
projection left them, whatever their strides, and may be written back to the same place.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

SHARED, INDEXED, RATES = 0, 1, 2
"""Where angles come from: one table for all heads, a table and an index per head, rates per head."""

MULTIPROCESSORS = 132
"""Of the GPU the block sizes are chosen for; elsewhere they are merely reasonable."""


class Blocks(NamedTuple):
    """What a program does at once."""

    tokens: int
    warps: int


@triton.jit
def rotate_kernel(
    q, k, q_out, k_out, cos, sin, index, rates, positions,
    tokens, length,
    q_b, q_t, k_b, k_t, qo_b, qo_t, ko_b, ko_t, a_b, a_t,
    q_h: tl.constexpr, k_h: tl.constexpr, qo_h: tl.constexpr, ko_h: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr,
    REST: tl.constexpr, REST_PAD: tl.constexpr,
    ADJACENT: tl.constexpr, INVERSE: tl.constexpr, ANGLES: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs turn neighbouring heads: what is read at one time lies close together in memory.
    program = tl.program_id(0)
    head = program % KV_HEADS
    token = (program // KV_HEADS) * BLOCK + tl.arange(0, BLOCK)
    live = token < tokens
    row, column = (token // length).to(tl.int64), (token % length).to(tl.int64)  # of the batch, of the text
    c, s = turning(
        cos, sin, index, rates, positions, head, row * a_b + column * a_t, live,
        PAIRS, PAIRS_PAD, INVERSE, ANGLES,
    )  # fmt: skip

    q_row = tl.multiple_of(row * q_b + column * q_t, ALIGN)
    qo_row = tl.multiple_of(row * qo_b + column * qo_t, ALIGN)
    for member in tl.static_range(GROUP):
        query = head * GROUP + member
        turn(
            q + query * q_h, q_row, q_out + query * qo_h, qo_row, c, s, live,
            PAIRS, PAIRS_PAD, REST, REST_PAD, ADJACENT,
        )  # fmt: skip
    k_row = tl.multiple_of(row * k_b + column * k_t, ALIGN)
    ko_row = tl.multiple_of(row * ko_b + column * ko_t, ALIGN)
    turn(
        k + head * k_h, k_row, k_out + head * ko_h, ko_row, c, s, live,
        PAIRS, PAIRS_PAD, REST, REST_PAD, ADJACENT,
    )  # fmt: skip


@triton.jit
def turning(
    cos, sin, index, rates, positions, head, row, live,
    PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, INVERSE: tl.constexpr, ANGLES: tl.constexpr,
):  # fmt: skip
    """Cosines and sines (tokens, pairs) of one key head; `row` is each token's place among the angles."""
    pair = tl.arange(0, PAIRS_PAD)
    if ANGLES == 2:
        # Exact in float64; what is left after whole turns is small enough for fast sines.
        bits = tl.load(rates + head * PAIRS + pair, mask=pair < PAIRS, other=0)
        rate = bits.to(tl.float32, bitcast=True).to(tl.float64)
        position = tl.load(positions + row, mask=live, other=0).to(tl.float64)
        turns = position[:, None] * rate[None, :] * 0.15915494309189535
        angle = (turns - tl.floor(turns + 0.5)).to(tl.float32) * 6.283185307179586
        c, s = tl.cos(angle), tl.sin(angle)
    else:
        if ANGLES == 1:
            place = tl.load(index + head * PAIRS + pair, mask=pair < PAIRS, other=0).to(tl.int32)
        else:
            place = pair
        mask = live[:, None] & (pair[None, :] < PAIRS)
        at = row[:, None] + place[None, :]
        c = tl.load(cos + at, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + at, mask=mask, other=0.0).to(tl.float32)
    if INVERSE:
        s = -s
    return c, s


@triton.jit
def turn(
    source, source_row, target, target_row, c, s, live,
    PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr,
    ADJACENT: tl.constexpr,
):  # fmt: skip
    """Rotate one head of a block of tokens; `REST` channels behind the pairs are copied, if there are any."""
    if ADJACENT:
        both = tl.arange(0, 2 * PAIRS_PAD)
        mask = live[:, None] & (both[None, :] < 2 * PAIRS)
        x = tl.load(source + source_row[:, None] + both[None, :], mask=mask, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, (x.shape[0], PAIRS_PAD, 2)))
        turned = tl.join(first * c - second * s, second * c + first * s)
        out = tl.reshape(turned, (x.shape[0], 2 * PAIRS_PAD)).to(target.dtype.element_ty)
        tl.store(target + target_row[:, None] + both[None, :], out, mask=mask)
    else:
        pair = tl.arange(0, PAIRS_PAD)
        mask = live[:, None] & (pair[None, :] < PAIRS)
        at = source_row[:, None] + pair[None, :]
        first = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + PAIRS + at, mask=mask, other=0.0).to(tl.float32)
        to = target_row[:, None] + pair[None, :]
        tl.store(target + to, (first * c - second * s).to(target.dtype.element_ty), mask=mask)
        tl.store(target + PAIRS + to, (second * c + first * s).to(target.dtype.element_ty), mask=mask)
    if REST > 0:
        rest = tl.arange(0, REST_PAD)
        beyond = live[:, None] & (rest[None, :] < REST)
        passed = tl.load(source + 2 * PAIRS + source_row[:, None] + rest[None, :], mask=beyond, other=0.0)
        tl.store(target + 2 * PAIRS + target_row[:, None] + rest[None, :], passed, mask=beyond)


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
    blocks = blocks or chosen_blocks(tokens, kv_heads, pairs)
    rest = 0 if q_out.data_ptr() == q.data_ptr() else width - 2 * pairs
    tensors = (q, k, q_out, k_out)
    rotate_kernel[(triton.cdiv(tokens, blocks.tokens) * kv_heads,)](
        # Pointers that are not read in this case must still be pointers.
        *tensors, *(x if x is not None else q for x in (cos, sin, index, rates, positions)),
        tokens, length,
        *(stride for x in tensors for stride in x.stride()[:2]),
        angles.stride(0) if angles.shape[0] > 1 else 0, angles.stride(1),
        *(x.stride(2) for x in tensors),
        KV_HEADS=kv_heads, GROUP=heads // kv_heads, PAIRS=pairs, PAIRS_PAD=triton.next_power_of_2(pairs),
        REST=rest, REST_PAD=triton.next_power_of_2(max(rest, 1)),
        ADJACENT=adjacent, INVERSE=inverse,
        ANGLES=RATES if rates is not None else SHARED if index is None else INDEXED,
        ALIGN=_alignment(tensors), BLOCK=blocks.tokens, num_warps=blocks.warps,
    )  # fmt: skip


def chosen_blocks(tokens: int, kv_heads: int, pairs: int) -> Blocks:
    """Eight channels per thread for long texts; as many programs as the GPU can hold for single tokens."""
    pad = triton.next_power_of_2(pairs)
    block = max(1, min(64, 1024 // pad))
    while block > 1 and triton.cdiv(tokens, block) * kv_heads < 4 * MULTIPROCESSORS:
        block //= 2
    return Blocks(block, max(1, min(4, block * pad // 256)))


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
