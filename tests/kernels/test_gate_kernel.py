"""The gate kernel, its plain twin and the operator around them compute silu(gate) * up.

References: the formula in float64; autograd's numerical gradients; the stock activation and product;
torch.library.opcheck. On a CPU the kernel runs in Triton's interpreter.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import interpreted
from torch import Tensor

from trisect.kernels.elementwise import gated, plain_gated

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of each element: two roundings, and a little for the exponential."""
WIDTHS = (1, 5, 80, 688, 1024, 5504)


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    """The kernel's module, run by Triton's interpreter."""
    with interpreted() as modules:
        yield modules["triton_elementwise"]


def product(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def written_out(y: Tensor) -> Tensor:
    gate, up = y.double().split(y.shape[-1] // 2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def launched(kernel: ModuleType, y: Tensor, **how: Any) -> Tensor:
    out = torch.full((*y.shape[:-1], y.shape[-1] // 2), torch.nan, dtype=y.dtype)
    kernel.launch_gate(y, out, **how)
    return out


def assert_gated(found: Tensor, y: Tensor) -> None:
    assert found.dtype == y.dtype
    torch.testing.assert_close(found.double(), written_out(y), rtol=TOLERANCE[y.dtype], atol=1e-6)


@given(
    lead=st.lists(st.integers(1, 4), min_size=0, max_size=3),
    width=st.one_of(st.integers(1, 40), st.sampled_from(WIDTHS)),
    dtype=st.sampled_from(list(TOLERANCE)),
    blocks=st.sampled_from([None, (2, 512, 4), (4, 16, 1), (1, 1024, 8)]),
)
@settings(max_examples=25)
def test_the_kernel_gates_products_of_any_shape(
    kernel: ModuleType, lead: list[int], width: int, dtype: torch.dtype, blocks: Any
) -> None:
    y = product(*lead, 2 * width, dtype=dtype)
    how = kernel.Blocks(*blocks) if blocks is not None and width * len(lead) < 2000 else None
    assert_gated(launched(kernel, y, blocks=how), y)


@given(
    lead=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    width=st.integers(1, 90),
    dtype=st.sampled_from(list(TOLERANCE)),
)
@settings(max_examples=25)
def test_twin_and_operator_gate_products_of_any_shape(lead: list[int], width: int, dtype: torch.dtype) -> None:
    y = product(*lead, 2 * width, dtype=dtype)
    assert_gated(gated(y), y)
    assert torch.ops.trisect.gated(y).equal(plain_gated(y))


def test_the_kernel_rounds_as_the_stock_activation_and_product_do(kernel: ModuleType) -> None:
    """But for the last bit of the exponential, which now and then tips a rounding.

    In float16: Triton's interpreter cuts bfloat16 off, where a GPU rounds.
    """
    y = product(64, 160, dtype=torch.float16)
    found, stock = launched(kernel, y), plain_gated(y)
    assert (found == stock).double().mean() > 0.99
    torch.testing.assert_close(found, stock, rtol=2 * torch.finfo(y.dtype).eps, atol=1e-7)


def test_rows_apart_are_read_where_they_lie_and_nothing_beside_them(kernel: ModuleType) -> None:
    wide = product(6, 50)
    wide[:, 40:] = torch.nan
    y = wide[:, :40]
    assert not y.is_contiguous()
    assert_gated(launched(kernel, y), y)
    assert_gated(launched(kernel, y.view(2, 3, 40)), y.view(2, 3, 40))
    turned = product(40, 6).t()
    assert not kernel.fits_gate(turned)
    assert_gated(torch.ops.trisect.gated(turned), turned)


def test_far_from_zero_the_gate_is_shut_or_open_and_nan_stays(kernel: ModuleType) -> None:
    gate = torch.tensor([-80.0, 0.0, 80.0, 3e38, torch.nan])
    y = torch.cat([gate, torch.ones(5)])
    torch.testing.assert_close(launched(kernel, y), plain_gated(y), equal_nan=True)


@pytest.mark.parametrize("rows", [1, 32, 4096])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_chosen_blocks_leave_no_warp_without_work(kernel: ModuleType, rows: int, width: int, itemsize: int) -> None:
    blocks = kernel.chosen_blocks(rows, width, itemsize)
    assert all(x > 0 and x & (x - 1) == 0 for x in blocks)
    assert blocks.rows * blocks.columns * itemsize >= 16 * 32 * blocks.warps
    assert blocks.rows == 1 or rows >= blocks.rows


def test_gradients_through_the_operator_are_those_of_finite_differences() -> None:
    y = product(2, 3, 10).double().requires_grad_()
    assert torch.autograd.gradcheck(torch.ops.trisect.gated, (y,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_through_the_operator_are_those_of_the_twin(dtype: torch.dtype) -> None:
    found = []
    for compute in (torch.ops.trisect.gated, plain_gated):
        y = product(3, 24, dtype=dtype).requires_grad_()
        compute(y).backward(product(3, 12, dtype=dtype, seed=1))
        found.append(y.grad)
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_the_operator_keeps_the_rules_of_torch() -> None:
    """Schema, fake tensors, autograd registration and tracing, as torch itself checks them."""
    for y in (product(2, 3, 8), product(5, 12)[:, :8]):
        torch.library.opcheck(torch.ops.trisect.gated.default, (y.requires_grad_(),))


def test_compiled_code_fuses_the_twin() -> None:
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    y = product(2, 8)
    assert_gated(torch.compile(gated, backend=keep, fullgraph=True)(y), y)
    assert not [node for node in graphs[0].graph.nodes if "trisect" in str(node.target)]
