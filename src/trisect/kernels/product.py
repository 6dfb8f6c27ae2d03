"""The product of one row with a matrix, together with the norm before and the sum behind it: decoding on a GPU."""

from typing import Any

import torch
from torch import Tensor

from trisect.kernels.operators import may_launch, on_its_device, wants_kernel


def is_one_row(x: Tensor) -> bool:
    """Whether the kernel below takes this input (..., K): of several rows, cuBLAS makes more than it does."""
    # In float16 what the next norm is told, a row before it is normed, may overflow.
    one = x.numel() == x.shape[-1] and x.dtype == torch.bfloat16
    return one and x.is_cuda and wants_kernel("product", x) and may_launch(x)


@on_its_device
def product(x: Tensor, weight: Tensor, bias: Tensor | None, **how: Any) -> Any:
    """See triton_product.launch."""
    from trisect.kernels.triton_product import launch

    return launch(x, weight, bias, **how)
