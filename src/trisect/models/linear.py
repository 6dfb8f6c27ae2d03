"""Read and build linear layers in the row-vector convention, whichever class holds them."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trisect.errors import TrisectError
from trisect.models.factored import FactoredLinear, GroupedLinear, SplitLinear
from trisect.models.quantized import QuantizedLinear


def weight_of(linear: Any) -> Tensor:
    """(in, out) view of the weight, so that y = x W."""
    return linear.weight.detach() if _stores_inputs_first(linear) else linear.weight.detach().T


def bias_of(linear: Any) -> Tensor | None:
    return None if linear.bias is None else linear.bias.detach()


def gradient_of(linear: Any) -> Tensor | None:
    """(in, out) view of the weight's gradient, or None before any backward pass."""
    first = _stores_inputs_first(linear)
    gradient: Tensor | None = linear.weight.grad
    return gradient if gradient is None or first else gradient.T


def sizes_of(linear: Any) -> tuple[int, int]:
    """Inputs and outputs, factored or quantised or neither."""
    if isinstance(linear, FactoredLinear | QuantizedLinear):
        return linear.in_features, linear.out_features
    d_in, d_out = weight_of(linear).shape
    return d_in, d_out


def built_from(old: Any, weight: Tensor, bias: Tensor | None, *, plain: bool = False) -> nn.Module:
    """A projection of the same class, dtype and mode as `old` with (in, out) weight and bias.

    `plain` makes it an nn.Linear whatever the class was.
    """
    d_in, d_out = weight.shape
    with torch.device("meta"):
        transposed = isinstance(old, Conv1D) and not plain
        new = Conv1D(d_out, d_in) if transposed else nn.Linear(d_in, d_out, bias=False)
    trains, dtype = old.weight.requires_grad, old.weight.dtype
    stored = weight if isinstance(new, Conv1D) else weight.T
    new.weight = nn.Parameter(stored.to(dtype).contiguous(), requires_grad=trains)
    if bias is not None:
        new.bias = nn.Parameter(bias.to(dtype).contiguous(), requires_grad=trains)
    return new.train(old.training)


def _stores_inputs_first(linear: Any) -> bool:
    """Whether the stored weight is (in, out) already; anything but a plain linear layer is refused."""
    if isinstance(linear, Conv1D):
        return True
    if type(linear) is nn.Linear:
        return False
    if isinstance(linear, FactoredLinear | GroupedLinear | SplitLinear):
        raise TrisectError("A linear map is already factored; compress the original model.")
    raise TrisectError(
        f"Cannot read a {type(linear).__name__} as a plain linear layer. Quantised or adapted checkpoints "
        "must be compressed first and quantised afterwards: pass the original weights."
    )
