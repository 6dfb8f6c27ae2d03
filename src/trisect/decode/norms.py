"""RMS norms in one kernel: stock ones take about six, which cost the same however narrow a model is."""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from trisect.decode.mixing import mix_in

TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""In float64 stock norms still compute in float32, and torch's does not."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SCALES = (1e-4, 1.0, 1e3)
"""Of the rows two norms are compared on: among the smallest, epsilon is what counts."""


class FusedNorm(nn.Module):
    """Mixed in before a stock RMS norm: torch's own kernel, which rounds once, where stock rounds twice."""

    weight: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight.dtype != x.dtype or x.dtype not in TYPES:
            return super().forward(x)  # the stock class
        return rms_norm(x, weight.shape, weight, epsilon_of(self))


def fuse_norm(module: nn.Module) -> None:
    """Let a module run as torch's RMS norm, if that is what it computes."""
    if not isinstance(module, FusedNorm) and is_rms_norm(module):
        mix_in(FusedNorm, module)


def epsilon_of(norm: Any) -> Any:
    """What a norm adds to the mean square, by either of the names in use; None if it has neither."""
    return getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module makes the mean square one and scales by its weight: found by trying, not by name."""
    names = [name for name, _ in module.named_parameters()]
    if names != ["weight"] or list(module.buffers()):
        return False
    weight = module.get_parameter("weight")
    if weight.ndim != 1 or weight.is_meta:
        return False
    if isinstance(module, nn.RMSNorm) or not isinstance(epsilon_of(module), float):
        return False
    # A forward of the instance's own would win over any class; more arguments mean more than a norm.
    if "forward" in vars(module) or len(inspect.signature(module.forward).parameters) != 1:
        return False
    return all(_agrees(module, dtype) for dtype in TOLERANCE)


def _agrees(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the module gives what torch's norm gives, in a type, for weights and rows made up here."""
    generator = torch.Generator().manual_seed(0)
    own = module.get_parameter("weight")
    weight = torch.rand(own.shape, generator=generator).add(0.5).to(own.device, dtype)
    # Off the middle, or a norm that takes the mean away would look the same.
    rows = torch.randn(len(SCALES), *own.shape, generator=generator).add(0.5)
    x = (rows * torch.tensor(SCALES)[:, None]).to(own.device, dtype)
    # A shallow copy, so that the module keeps its weight; its forward, so that nobody's hook hears of it.
    double = copy.copy(module)
    double._parameters = {**module._parameters, "weight": nn.Parameter(weight, requires_grad=False)}
    with torch.no_grad():
        found = double.forward(x)
    expected = rms_norm(x, weight.shape, weight, epsilon_of(module))
    if not isinstance(found, Tensor) or found.dtype != dtype or found.shape != x.shape:
        return False
    return torch.allclose(found, expected, rtol=TOLERANCE[dtype], atol=0)
