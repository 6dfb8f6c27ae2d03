# Triton functions have no types of Python: their arguments are pointers and numbers on the device.
# mypy: disable-error-code="no-untyped-def, assignment"
"""The product of one row with a matrix: what a decoding step of a single text reads its weights with.

All it waits for is memory: a program has a few rows of the weight and sums over all of their columns. What used to
be kernels of their own happens where numbers are in registers anyway: the RMS norm of the input, as a factor behind
the product; the gate; the residual and what the next norm needs to know of it. A kernel is launched while the one
before it runs, and waits for its end only where it reads what that one wrote.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from trisect.kernels.triton_rotary import MULTIPROCESSORS


class Tiles(NamedTuple):
    """How a product is cut: rows of the weight and columns at once, warps, loads in flight."""

    rows: int
    columns: int
    warps: int
    stages: int


@triton.jit
def product_kernel(
    x, weight, bias, residual, gain, before, out, scaled, squares,
    width, depth, blocks_before, eps,
    N: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, BEFORE: tl.constexpr, RESIDUAL: tl.constexpr, GAIN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    n, k = block * N + tl.arange(0, N), tl.arange(0, K)
    # A last, incomplete block reads the last row again.
    own = weight + tl.minimum(n, width - 1).to(tl.int64) * depth
    up = own + width.to(tl.int64) * depth
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    if BEFORE > 0:
        part = tl.arange(0, BEFORE)
        summed = tl.load(before + part, mask=part < blocks_before, other=0.0)
    first, second = tl.zeros((N, K), tl.float32), tl.zeros((N, K), tl.float32)
    for at in tl.range(0, depth, K, num_stages=STAGES):
        column = at + k
        mask = column < depth
        v = (tl.load(x + column) if EVEN else tl.load(x + column, mask=mask, other=0.0)).to(tl.float32)[None, :]
        first += v * columns(own, column, mask, EVEN)
        if GATE:
            second += v * columns(up, column, mask, EVEN)
    total, other = tl.sum(first, axis=1), tl.sum(second, axis=1)
    kept = n < width
    if BEFORE > 0:
        factor = tl.rsqrt(tl.sum(summed, axis=0) / depth + eps)
        total, other = total * factor, other * factor
    if BIAS:
        total += tl.load(bias + n, mask=kept, other=0.0).to(tl.float32)
        if GATE:
            other += tl.load(bias + width + n, mask=kept, other=0.0).to(tl.float32)
    if GATE:
        total = total / (1.0 + tl.exp(-total)) * other
    if RESIDUAL:
        total += tl.load(residual + n, mask=kept, other=0.0).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    tl.store(out + n, result, mask=kept)
    if GAIN:
        value = tl.where(kept, result.to(tl.float32), 0.0)
        by = tl.load(gain + n, mask=kept, other=0.0).to(tl.float32)
        tl.store(scaled + n, (value * by).to(scaled.dtype.element_ty), mask=kept)
        tl.store(squares + block, tl.sum(value * value, axis=0))


@triton.jit
def columns(matrix, column, mask, EVEN: tl.constexpr):
    """Some columns of rows: read once, so they need not stay in a cache."""
    at = matrix[:, None] + column[None, :]
    if EVEN:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        w = tl.load(at, mask=mask[None, :], other=0.0, eviction_policy="evict_first")
    return w.to(tl.float32)


class Carried(NamedTuple):
    """A row as the next norm wants it: times its weight, and the sums of its squares, block by block."""

    scaled: Tensor
    squares: Tensor


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    gate: bool = False,
    residual: Tensor | None = None,
    gain: Tensor | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Carried | None]:
    """x (1, K) times weight (N, K), then in this order: over the root of its mean square, bias, gate, residual.

    `squares` belong to x as they are `Carried` from the product that made it; `gain` is the next norm's weight.
    With `gate` the weight holds [gate | up].
    """
    depth, width = x.shape[-1], len(weight) // 2 if gate else len(weight)
    tiles = tiles or chosen_tiles(width, gate=gate)
    blocks = triton.cdiv(width, tiles.rows)
    out, carried = x.new_empty(1, width), None
    if gain is not None:
        carried = Carried(torch.empty_like(out), torch.empty(blocks, dtype=torch.float32, device=x.device))
    product_kernel[(blocks,)](
        x, weight, *(x if given is None else given for given in (bias, residual, gain, squares)),
        out, *(carried or (out, out)), width, depth, 0 if squares is None else len(squares), eps,
        N=tiles.rows, K=tiles.columns, STAGES=tiles.stages, EVEN=depth % tiles.columns == 0,
        GATE=gate, BIAS=bias is not None, RESIDUAL=residual is not None, GAIN=gain is not None,
        BEFORE=0 if squares is None else triton.next_power_of_2(len(squares)),
        num_warps=tiles.warps, **early(x),
    )  # fmt: skip
    return out, carried


def early(x: Tensor) -> dict[str, bool]:
    """How to launch a kernel while the one before it runs: Hopper and later can."""
    able = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}


def chosen_tiles(width: int, *, gate: bool) -> Tiles:
    """What was fastest in a step of llama shapes on an H200 (docs/log.md)."""
    if gate:
        return Tiles(4, 512, warps=2, stages=4)
    # Large blocks pay where they fill all multiprocessors equally, with two of them each.
    share = triton.cdiv(width, 16) / MULTIPROCESSORS
    return Tiles(16, 512, warps=8, stages=3) if 1.9 < share <= 2 else Tiles(4, 512, warps=4, stages=5)
