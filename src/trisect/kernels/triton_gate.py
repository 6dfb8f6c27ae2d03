# Triton functions have no types of Python: their arguments are pointers and numbers on the device.
# mypy: disable-error-code="no-untyped-def, assignment"
"""The gate kernel: silu(gate) * up of a fused product [gate | up], read once and in one launch.

One program does some columns of a few rows. All it does is move memory, so every thread asks for sixteen
bytes of both halves at a time. Widths and strides are numbers, not constants: layers that were cut to
different widths share one compilation.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trisect.kernels.triton_rotary import MULTIPROCESSORS

COLUMNS = (512, 1024)
"""What a program may do of a row; two choices, because a width is seldom a multiple of the larger."""
MANY = 2048
"""Elements of each half that a program does where there is enough for all."""


class Blocks(NamedTuple):
    """What a program does at once: powers of two."""

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


def launch(y: Tensor, out: Tensor, *, blocks: Blocks | None = None) -> None:
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


def fits(y: Tensor) -> bool:
    """Whether the kernel takes this product: on a GPU, 16 or 32 bits, columns side by side."""
    known = y.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return y.is_cuda and known and y.stride(-1) == 1
