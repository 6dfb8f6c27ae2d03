"""RMS-norm with one weight vector per head: what QK-norm becomes when heads keep different channels."""

import torch
from torch import Tensor, nn


class HeadNorm(nn.Module):
    """Normalise the last dimension of (..., heads, width); float32 inside, as the stock norms are."""

    def __init__(self, heads: int, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def eps_of(norm: nn.Module) -> float:
    """The stock norms call it variance_epsilon, ours eps."""
    return norm.eps if isinstance(norm, HeadNorm) else norm.variance_epsilon  # type: ignore[return-value]
