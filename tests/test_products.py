"""Products by oneDNN: the same numbers as torch's, whatever the strides, with gradients and without."""

import pytest
import torch
from torch import Tensor

from trisect.solve.ridge import gram
from trisect.support import products


@pytest.fixture(autouse=True)
def every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LARGE", 0)
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("torch without oneDNN")


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_matrices_of_any_strides_are_multiplied_as_torch_does() -> None:
    x, y = random(40, 24), random(24, 56)
    for left in (x, x.mT.contiguous().mT, random(80, 48)[::2, ::2]):
        for right in (y, y.mT.contiguous().mT, random(24, 112)[:, ::2]):
            expected = left @ right
            with products.OneDnnProducts():
                close(left @ right, expected)


def test_several_matrices_are_multiplied_as_torch_does() -> None:
    x, y = random(3, 40, 24), random(3, 56, 24).mT
    expected = x @ y
    with products.OneDnnProducts():
        close(x @ y, expected)
        assert (x[:0] @ y[:0]).shape == (0, 40, 56)


def test_products_in_8_bits_are_the_same_with_instructions_for_them_and_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = products.short(random(40, 640)), products.short(random(640, 56))
    assert x.dtype == torch.bfloat16
    found = [products.short_product(x, y)]
    monkeypatch.setattr(products, "native_bfloat16", lambda: False)
    found.append(products.short_product(x, y))
    exact = x.double() @ y.double()
    for one in found:
        assert one.dtype == torch.bfloat16
        # Numbers are rounded once, when they are added up: by half of the last of 8 bits.
        torch.testing.assert_close(one.double(), exact, rtol=2**-8, atol=1e-4)
    assert (found[0] != found[1]).float().mean() < 0.01


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_and_its_gradients_are_the_same(mode: type, bias: bool) -> None:
    layer = torch.nn.Linear(24, 56, bias=bias)
    found = []
    for engine in (products.OneDnnProducts(), torch.no_grad() if mode is not torch.enable_grad else mode()):
        with engine, mode():
            x = random(3, 10, 24).requires_grad_(mode is torch.enable_grad)
            y = layer(x)
            slopes = torch.autograd.grad(y.square().sum(), [x, layer.weight]) if x.requires_grad else ()
            found.append((y.detach(), *slopes))
    for one, other in zip(*found, strict=True):
        close(one, other)


def test_other_numbers_and_devices_are_left_alone() -> None:
    x = random(8, 8).double()
    with products.OneDnnProducts():
        assert torch.equal(x @ x, x.matmul(x))
        assert (x.bfloat16() @ x.bfloat16()).dtype == torch.bfloat16
    with products.fast_products(torch.device("meta")) as nothing:
        assert nothing is None


@pytest.mark.parametrize("width", [1, 255, 257, 700, 2500])
def test_a_gram_by_strips_is_symmetric_and_the_product(width: int) -> None:
    x = random(40, width)
    found = gram(x, gram(x))
    torch.testing.assert_close(found, 2 * x.double().mT @ x.double(), rtol=1e-5, atol=1e-4)
    off = found - found.mT
    assert off.abs().max() <= 1e-5 * found.abs().max()
