"""The norm kernel computes the RMS norm of rows: the formula in float64, in Triton's interpreter."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import interpreted
from torch import Tensor

from trisect.kernels import using
from trisect.kernels.elementwise import normed

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of each element: one rounding, and a little for the root."""


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    """The kernel's module, run by Triton's interpreter."""
    with interpreted() as modules:
        yield modules["triton_elementwise"]


def rows(*shape: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(shape, generator=draw) + 0.5
    return x.to(dtype), (torch.rand(shape[-1], generator=draw) + 0.5).to(dtype)


def written_out(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight.double()


@given(
    lead=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    width=st.one_of(st.integers(1, 40), st.sampled_from([128, 576, 5120])),
    dtype=st.sampled_from(list(TOLERANCE)),
    eps=st.sampled_from([1e-6, 1e-5, 1.0]),
)
@settings(max_examples=25)
def test_the_kernel_norms_rows_of_any_shape(
    kernel: ModuleType, lead: list[int], width: int, dtype: torch.dtype, eps: float
) -> None:
    x, weight = rows(*lead, width, dtype=dtype)
    out = torch.full(x.shape, torch.nan, dtype=dtype)
    kernel.launch_norm(x, weight, out, eps)
    torch.testing.assert_close(out.double(), written_out(x, weight, eps), rtol=TOLERANCE[dtype], atol=1e-6)


def test_rows_that_lie_apart_are_read_where_they_are(kernel: ModuleType) -> None:
    whole, _ = rows(4, 3, 64, dtype=torch.float32)
    x, weight = whole[:, 1], rows(64, dtype=torch.float32)[1]
    out = torch.empty(4, 64)
    kernel.launch_norm(x, weight, out, 1e-6)
    torch.testing.assert_close(out.double(), written_out(x, weight, 1e-6), rtol=2e-6, atol=1e-6)


def test_without_a_gpu_torch_norms_whatever_is_chosen() -> None:
    x, weight = rows(2, 8, dtype=torch.float32)
    with using(norm="kernel"), torch.no_grad():
        torch.testing.assert_close(normed(x, weight, 1e-6).double(), written_out(x, weight, 1e-6), rtol=2e-6, atol=1e-6)
