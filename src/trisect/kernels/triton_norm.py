# Triton functions have no types of Python: their arguments are pointers and numbers on the device.
# mypy: disable-error-code="no-untyped-def, assignment"
"""The norm kernel: the RMS norm of single rows, all of a row asked for at once.

Torch's kernel is made for many rows; for the few of a decoding step it takes three times as long as a launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 256
WIDEST = 1 << 14
"""More numbers than a program's registers hold at once."""


@triton.jit
def norm_kernel(x, weight, out, x_row, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    value = tl.load(x + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(value * value, axis=0) / width
    tl.store(out + row * width + column, (value * tl.rsqrt(mean + eps) * scale).to(out.dtype.element_ty), mask=mask)


def launch(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    """Write the norm of every row of x (..., D), scaled by `weight` (D,), into `out`, which is dense."""
    width = x.shape[-1]
    flat = x.reshape(-1, width)
    block = triton.next_power_of_2(width)
    warps = max(1, min(16, block // 256))  # sixteen bytes per thread, as far as there are threads
    norm_kernel[(len(flat),)](flat, weight, out, flat.stride(0), width, eps, BLOCK=block, num_warps=warps)


def fits(x: Tensor) -> bool:
    """Whether the kernel takes these rows: few, not too wide, on a GPU, numbers side by side."""
    known = x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    few = 0 < x.numel() <= MOST_ROWS * x.shape[-1]
    return x.is_cuda and known and few and x.shape[-1] <= WIDEST and x.stride(-1) == 1
