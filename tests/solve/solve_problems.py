"""Samples and second moments for the solvers' tests."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

SEEDS = st.integers(0, 2**31 - 1)
few = settings(max_examples=25)


def samples(seed: int, *, tokens: int, width: int, spread: float = 1.0) -> Tensor:
    """Correlated rows whose second moment has eigenvalues over about `spread`."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q
    return noise * spread ** -torch.linspace(0, 0.5, width, dtype=torch.float64) @ basis


def moment(x: Tensor) -> Tensor:
    return x.mT @ x / x.shape[-2]
