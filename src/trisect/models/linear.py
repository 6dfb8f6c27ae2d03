"""Read and build linear layers in the row-vector convention, whichever class holds them."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trisect.errors import TrisectError


def weight_of(linear: Any) -> Tensor:
    """(in, out) view of the weight, so that y = x W."""
    if isinstance(linear, Conv1D):
        return linear.weight.detach()
    if type(linear) is nn.Linear:
        return linear.weight.detach().T
    raise TrisectError(
        f"Cannot read a {type(linear).__name__} as a plain linear layer. Quantised or adapted checkpoints "
        "must be compressed first and quantised afterwards: pass the original weights."
    )


def bias_of(linear: Any) -> Tensor | None:
    return None if linear.bias is None else linear.bias.detach()


def built_from(old: Any, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """A projection of the same class, dtype and mode as `old` with (in, out) weight and bias."""
    d_in, d_out = weight.shape
    with torch.device("meta"):
        new = Conv1D(d_out, d_in) if isinstance(old, Conv1D) else nn.Linear(d_in, d_out, bias=False)
    trains, dtype = old.weight.requires_grad, old.weight.dtype
    stored = weight if isinstance(new, Conv1D) else weight.T
    new.weight = nn.Parameter(stored.to(dtype).contiguous(), requires_grad=trains)
    if bias is not None:
        new.bias = nn.Parameter(bias.to(dtype).contiguous(), requires_grad=trains)
    return new.train(old.training)
