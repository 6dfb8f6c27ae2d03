"""The gate of an MLP and the RMS norm: a Triton kernel where it applies, plain torch elsewhere.

`trisect::gated` is a custom operator, so that torch.compile, autograd and CUDA graphs know what happens.
"""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from trisect.kernels.operators import has_triton, may_launch, on_its_device, register, wants_kernel


def gated(y: Tensor) -> Tensor:
    """silu(gate) * up of a product (..., 2 i) that holds [gate | up]: (..., i)."""
    if not wants_kernel("gate", y):
        return plain_gated(y)
    found: Tensor = _gated_here(y) if may_launch(y) else torch.ops.trisect.gated(y)
    return found


def plain_gated(y: Tensor) -> Tensor:
    """What the kernel does, in plain torch: as stock models have it, with their two roundings."""
    gate, up = y.chunk(2, dim=-1)
    return silu(gate) * up


def _gated(y: Tensor) -> Tensor:
    out = _half(y)
    if has_triton() and y.is_cuda:
        from trisect.kernels import triton_elementwise

        if triton_elementwise.fits_gate(y):
            triton_elementwise.launch_gate(y, out)
            return out
    return out.copy_(plain_gated(y))


_gated_here = on_its_device(_gated)


def _half(y: Tensor) -> Tensor:
    return torch.empty((*y.shape[:-1], y.shape[-1] // 2), dtype=y.dtype, device=y.device)


def _remember(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors  # type: ignore[attr-defined]
    gate, up = y.chunk(2, dim=-1)
    return torch.cat([torch.ops.aten.silu_backward(grad * up, gate), grad * silu(gate)], dim=-1)


register("gated", "(Tensor y) -> Tensor", _gated, fake=_half, remember=_remember, backward=_backward)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., D) with a mean square of one in every row, times weight (D,): rounded once."""
    if wants_kernel("norm", x) and may_launch(x):
        from trisect.kernels import triton_elementwise

        if triton_elementwise.fits_norm(x):
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            with torch.cuda.device_of(x):
                triton_elementwise.launch_norm(x, weight, out, eps)
            return out
    return rms_norm(x, weight.shape, weight, eps)
