"""The RMS norm: the Triton kernel for the few rows of a decoding step, torch's own elsewhere."""

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from trisect.kernels.operators import may_launch, on_its_device, wants_kernel


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., D) with a mean square of one in every row, times weight (D,): rounded once."""
    if wants_kernel("norm", x) and may_launch(x):
        from trisect.kernels.triton_norm import fits

        if fits(x):
            return _launched(x, weight, eps)
    return rms_norm(x, weight.shape, weight, eps)


@on_its_device
def _launched(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from trisect.kernels.triton_norm import launch

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(x, weight, out, eps)
    return out
