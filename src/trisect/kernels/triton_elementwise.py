# Triton functions have no types of Python: their arguments are pointers and numbers on the device.
# mypy: disable-error-code="no-untyped-def, assignment"
"""Kernels that read every number once, in one launch: silu(gate) * up of a fused product [gate | up], and RMS norms.

All they do is move memory, so every thread asks for sixteen bytes at a time. Widths and strides are numbers, not
constants: layers that were cut to different widths share one compilation.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trisect.kernels.triton_rotary import MULTIPROCESSORS

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
COLUMNS = (512, 1024)  # what a program may gate of a row; two, because a width is seldom a multiple of the larger
MANY = 2048  # elements of each half that a program gates where there is enough for all
MOST_ROWS = 256  # torch's own norm is made for more; for the few of a decoding step it takes three launches' time
WIDEST = 1 << 14  # a program of the norm holds no more numbers in its registers


class Blocks(NamedTuple):
    """What a program gates at once: powers of two."""

    rows: int
    columns: int
    warps: int


@triton.jit
def gate_kernel(
    y, out, rows, width, y_row, blocks_per_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    column = (program % blocks_per_row) * COLUMNS + tl.arange(0, COLUMNS)
    row = (program // blocks_per_row) * ROWS + tl.arange(0, ROWS)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    # Long prompts of wide models have more elements than 32 bits can count.
    far = row.to(tl.int64)[:, None]
    source = y + far * y_row + column[None, :]
    gate = tl.load(source, mask=mask, other=0.0)
    up = tl.load(source + width, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded between, as torch does, whose activation and product are two kernels.
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = active.to(tl.float32) * up.to(tl.float32)
    tl.store(out + far * width + column[None, :], product.to(gate.dtype), mask=mask)


def launch_gate(y: Tensor, out: Tensor, *, blocks: Blocks | None = None) -> None:
    """Write silu of the first half of y's last dimension, times the second, into `out`, which is dense."""
    width = out.shape[-1]
    if out.numel() == 0:
        return
    flat = y.reshape(-1, 2 * width)  # a view, wherever the rows have one distance from each other
    rows = flat.shape[0]
    blocks = blocks or chosen_blocks(rows, width, y.element_size())
    per_row = triton.cdiv(width, blocks.columns)
    gate_kernel[(triton.cdiv(rows, blocks.rows) * per_row,)](
        flat, out, rows, width, flat.stride(0), per_row,
        ROWS=blocks.rows, COLUMNS=blocks.columns, num_warps=blocks.warps,
    )  # fmt: skip


def chosen_blocks(rows: int, width: int, itemsize: int) -> Blocks:
    """Sixteen bytes of both halves per thread for single tokens; several times that for long texts."""
    columns = min(COLUMNS, key=lambda block: (triton.cdiv(width, block) * block, -block))
    if rows * triton.cdiv(width, columns) < 32 * MULTIPROCESSORS:
        return Blocks(1, columns, columns * itemsize // 512)
    return Blocks(MANY // columns, columns, 4)


def fits_gate(y: Tensor) -> bool:
    """Whether the kernel takes this product: on a GPU, 16 or 32 bits, columns side by side."""
    return y.is_cuda and y.dtype in FLOATS and y.stride(-1) == 1


@triton.jit
def norm_kernel(x, weight, out, x_row, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    value = tl.load(x + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(value * value, axis=0) / width
    tl.store(out + row * width + column, (value * tl.rsqrt(mean + eps) * scale).to(out.dtype.element_ty), mask=mask)


def launch_norm(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    """Write the norm of every row of x (..., D), scaled by `weight` (D,), into `out`, which is dense."""
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    block = triton.next_power_of_2(width)
    warps = max(1, min(16, block // 256))  # sixteen bytes per thread, as far as there are threads
    norm_kernel[(len(flat),)](flat, weight, out, flat.stride(0), width, eps, BLOCK=block, num_warps=warps)


def fits_norm(x: Tensor) -> bool:
    """Whether the kernel takes these rows: few, not too wide, on a GPU, numbers side by side."""
    few = 0 < x.numel() <= MOST_ROWS * x.shape[-1]
    return x.is_cuda and x.dtype in FLOATS and few and x.shape[-1] <= WIDEST and x.stride(-1) == 1
