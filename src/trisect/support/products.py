"""Large float32 products on a CPU with AVX-512, through oneDNN instead of MKL.

MKL has AVX-512 for Intel's processors alone; on AMD's oneDNN is twice as fast, and torch asks it for 16 bits only.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

LARGE = 1 << 27  # multiplications; of smaller products there are many, and each would pay for the way through Python


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
        if func is aten.addmm.default and not kwargs and args[0].ndim == 1 and _large(*args[1:]):
            return _product(args[1], args[2], args[0])
        if func is aten.linear.default and _large(rows := args[0].flatten(0, -2), W := args[1].mT):  # of inference mode
            return _product(rows, W, *args[2:]).unflatten(0, args[0].shape[:-1])
        return func(*args, **(kwargs or {}))


def _large(x: Tensor, y: Tensor) -> bool:
    ours = x.dtype == y.dtype == torch.float32 and x.device.type == y.device.type == "cpu"
    return ours and x.shape[0] * x.shape[1] * y.shape[1] >= LARGE


def _product(x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(x), _dense(y).mT, bias, "none", [], "")
    return found


def _dense(x: Tensor) -> Tensor:
    """Without gaps between rows or columns: oneDNN has no fast way for those."""
    return x if x.is_contiguous() or x.mT.is_contiguous() else x.contiguous()
