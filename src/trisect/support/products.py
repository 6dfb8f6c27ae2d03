"""Products that a CPU computes faster than torch would by itself.

Large ones of float32 go through oneDNN instead of MKL where there is AVX-512: MKL has that for Intel's processors
alone; on AMD's oneDNN is twice as fast, and torch asks it for 16 bits only. Products that can do with 8 bits of
precision are taken in bfloat16, which is another three times as fast where the CPU has instructions for it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LARGE = 1 << 22  # multiplications; of smaller products there are many, and each would pay for the way through Python


def fast_products(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, products of large float32 matrices take the faster way, gradients' too; elsewhere nothing changes."""
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()
    able = wide and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # what compiled models on CPUs use
    return OneDnnProducts() if able and device.type == "cpu" else nullcontext()


class OneDnnProducts(TorchDispatchMode):
    """torch's matrix products, the large ones by oneDNN."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.mm.default and _large(*args):
            return _product(*args)
        if func is aten.bmm.default and len(args[0]) and _large(*args):
            found = [_product(x, y) for x, y in zip(*args, strict=True)]
            return found[0].unsqueeze(0) if len(found) == 1 else torch.stack(found)
        if func is aten.addmm.default and not kwargs and args[0].ndim == 1 and _large(*args[1:]):
            return _product(args[1], args[2], args[0])
        if func is aten.linear.default and _large(rows := args[0].flatten(0, -2), W := args[1].mT):  # of inference mode
            return _product(rows, W, *args[2:]).unflatten(0, args[0].shape[:-1])
        return func(*args, **(kwargs or {}))


def short(x: Tensor) -> Tensor:
    """float32 numbers with 8 bits of precision; others as they are."""
    return x.to(torch.bfloat16) if x.dtype == torch.float32 else x


def short_product(x: Tensor, y: Tensor) -> Tensor:
    """x y of `short` numbers, short again: the same on every machine, but for rounding in float32."""
    if x.device.type != "cpu" or x.dtype != torch.bfloat16 or native_bfloat16():
        return x @ y
    return (x.float() @ y.float()).to(x.dtype)


@cache
def native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 by instructions of its own; without them it would take longer."""
    known = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return known is not None and known() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _large(x: Tensor, y: Tensor) -> bool:
    ours = x.dtype == y.dtype == torch.float32 and x.device.type == y.device.type == "cpu"
    return ours and x.shape[-2] * x.shape[-1] * y.shape[-1] >= LARGE  # each of them, where there are several


def _product(x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(x), _dense(y).mT, bias, "none", [], "")
    return found


def _dense(x: Tensor) -> Tensor:
    """Without gaps between rows or columns: oneDNN has no fast way for those."""
    return x if x.is_contiguous() or x.mT.is_contiguous() else x.contiguous()
