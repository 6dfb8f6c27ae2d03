"""The rotary kernel, its plain twin and the operators around them turn heads as complex numbers do.

References: complex multiplication in float64; autograd through the twin; torch.library.opcheck. On a CPU the
kernel runs in Triton's interpreter.
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rotations import Problem, answer, problem
from torch import Tensor

from trisect.errors import TrisectError
from trisect.kernels import rotate_qk, using
from trisect.kernels.rotary import rate_angles

KINDS = ("shared", "index", "rates")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def launched(kernels: dict[str, ModuleType], p: Problem, *, inverse: bool = False) -> tuple[Tensor, Tensor]:
    out = torch.empty(p.q.shape, dtype=p.q.dtype), torch.empty(p.k.shape, dtype=p.k.dtype)
    adjacent = p.layout == "adjacent"
    module = kernels["triton_rotary"]
    blocks = module.Blocks(tokens=4, heads=1, warps=1)  # few programs: the interpreter runs one after the other
    module.launch(p.q, p.k, *out, *p.flat(), pairs=p.pairs, adjacent=adjacent, inverse=inverse, blocks=blocks)
    return out


def assert_turned(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)),
    pairs=st.integers(1, 9),
    rest=st.integers(0, 3),
    layout=st.sampled_from(["half", "adjacent"]),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(list(TOLERANCE)),
    strided=st.booleans(),
    inverse=st.booleans(),
)
@settings(max_examples=20)
def test_the_kernel_turns_heads_of_any_shape_as_complex_numbers_do(
    kernels: dict[str, ModuleType], shape: Any, dtype: torch.dtype, inverse: bool, **how: Any
) -> None:
    batch, length, kv_heads, group = shape
    p = problem(batch=batch, length=length, kv_heads=kv_heads, group=group, dtype=dtype, **how)
    assert_turned(launched(kernels, p, inverse=inverse), answer(p, backwards=inverse), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["half", "adjacent"])
def test_the_twin_turns_heads_as_complex_numbers_do(kind: str, layout: str) -> None:
    p = problem(kind=kind, layout=layout, rest=3, pairs=6)
    found = rotate_qk(p.q, p.k, pairs=p.pairs, layout=layout, **p.angles())  # type: ignore[arg-type]
    assert_turned(found, answer(p), torch.float32)


@pytest.mark.parametrize("first", [131_072, 1_000_000])
def test_rates_are_exact_beyond_a_hundred_thousand_tokens(kernels: dict[str, ModuleType], first: int) -> None:
    p = problem(kind="rates", first=first, pairs=12)
    assert_turned(launched(kernels, p), answer(p), torch.float32)
    assert_turned(rotate_qk(p.q, p.k, pairs=12, layout="half", **p.angles()), answer(p), torch.float32)


def test_cosines_and_sines_of_rates_are_within_two_ten_millionths(kernels: dict[str, ModuleType]) -> None:
    """Of float64, over several turns either way: a head of (1, 0) turns into its cosine and sine."""
    heads, pairs = 4, 1024
    rates = torch.linspace(-7, 7, heads * pairs).view(heads, pairs)
    positions = torch.tensor([[0, 1, 1_000_003]])
    ones = torch.cat([torch.ones(1, 3, heads, pairs), torch.zeros(1, 3, heads, pairs)], dim=-1)
    q, k = torch.empty_like(ones), torch.empty_like(ones)
    flat = (None, None, None, rates.view(torch.int32), positions)
    kernels["triton_rotary"].launch(ones, ones, q, k, *flat, pairs=pairs, adjacent=False, inverse=False)
    angle = positions[..., None, None].double() * rates.double()
    exact = torch.cat([angle.cos(), angle.sin()], dim=-1)
    assert (q - exact).abs().max() < 2e-7
    assert q.equal(k)


def test_angles_in_float32_would_not_be_exact_there() -> None:
    """Otherwise the tests above prove nothing."""
    positions, rates = (torch.tensor([[131_073]]), torch.rand(1, 64, generator=torch.Generator().manual_seed(0)))
    cos, sin = rate_angles(rates, positions)
    exact = positions[..., None, None].double() * rates.double()
    naive = positions[..., None, None].float() * rates
    assert (naive.double().cos() - exact.cos()).abs().max() > 1e-3
    torch.testing.assert_close(cos.double(), exact.cos(), rtol=0, atol=3e-7)
    torch.testing.assert_close(sin.double(), exact.sin(), rtol=0, atol=3e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_in_place_the_kernel_changes_heads_and_nothing_beside_them(kernels: dict[str, ModuleType], kind: str) -> None:
    p = problem(kind=kind, rest=2, strided=True)
    expected, base = answer(p), p.q._base
    assert base is not None
    values = base[..., -7 * p.k.shape[2] :].clone()
    kernels["triton_rotary"].launch(p.q, p.k, p.q, p.k, *p.flat(), pairs=p.pairs, adjacent=False, inverse=False)
    assert_turned((p.q, p.k), expected, torch.float32)
    assert base[..., -7 * p.k.shape[2] :].equal(values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [(1, 1, 1), (2, 2, 1), (8, 4, 4), (1, 4, 1, 1), (2, 1, 1, 2)])
def test_any_size_of_block_gives_the_same(kernels: dict[str, ModuleType], blocks: tuple[int, ...], kind: str) -> None:
    p = problem(batch=1, length=5, kv_heads=4, kind=kind)
    out = torch.empty_like(p.q), torch.empty_like(p.k)
    module = kernels["triton_rotary"]
    module.launch(
        p.q, p.k, *out, *p.flat(), pairs=p.pairs, adjacent=False, inverse=False, blocks=module.Blocks(*blocks)
    )
    assert_turned(out, answer(p), torch.float32)


@pytest.mark.parametrize("tokens", [1, 32, 4096])
@pytest.mark.parametrize("kv_heads", [1, 3, 8, 40])
@pytest.mark.parametrize("pairs", [1, 20, 48, 128])
def test_chosen_blocks_divide_the_heads_and_leave_no_warp_without_work(
    kernels: dict[str, ModuleType], tokens: int, kv_heads: int, pairs: int
) -> None:
    for itemsize in (2, 4):
        blocks = kernels["triton_rotary"].chosen_blocks(tokens, kv_heads, pairs, itemsize)
        assert kv_heads % blocks.heads == 0
        assert all(x & (x - 1) == 0 for x in blocks[:3])  # powers of two, as Triton wants them
        padded = 1 << (pairs - 1).bit_length()
        pieces = blocks.tokens * blocks.heads * padded * itemsize // 16
        assert blocks.warps == 1 or pieces >= 32 * blocks.warps


def test_one_row_of_angles_serves_every_text(kernels: dict[str, ModuleType]) -> None:
    p = problem(batch=1, kind="index")
    p.q, p.k = p.q.repeat(3, 1, 1, 1), p.k.repeat(3, 1, 1, 1)
    q, k = launched(kernels, p)
    assert all(x[1:].equal(x[:1].expand_as(x[1:])) for x in (q, k))
    assert_turned((q[:1], k[:1]), answer(problem(batch=1, kind="index")), torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_through_the_operator_are_those_of_the_twin(kind: str) -> None:
    p = problem(kind=kind, rest=2)
    found = []
    for choice in ("kernel", "plain"):
        q, k = p.q.clone().requires_grad_(), p.k.clone().requires_grad_()
        with using(rotary=choice):  # type: ignore[arg-type]
            turned = rotate_qk(q, k, pairs=p.pairs, layout="half", in_place=True, **p.angles())
        weights = torch.randn(p.q.shape, generator=torch.Generator().manual_seed(1))
        ((turned[0] * weights).sum() + turned[1].square().sum()).backward()
        found.append((q.grad, k.grad))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


def test_the_kernel_backwards_is_the_gradient(kernels: dict[str, ModuleType]) -> None:
    p = problem(kind="rates", layout="adjacent")
    q, k = p.q.clone().requires_grad_(), p.k.clone().requires_grad_()
    turned = rotate_qk(q, k, pairs=p.pairs, layout="adjacent", **p.angles())
    torch.autograd.backward(turned, (p.q, p.k))  # the heads serve as gradients
    assert q.grad is not None
    assert k.grad is not None
    assert_turned(launched(kernels, p, inverse=True), (q.grad.double(), k.grad.double()), torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_the_operators_keep_the_rules_of_torch(kind: str) -> None:
    """Schema, fake tensors, autograd registration and tracing, as torch itself checks them."""
    p = problem(kind=kind, batch=1, length=2, rest=1)
    operators = torch.ops.trisect
    q, k = p.q.clone().requires_grad_(), p.k.clone().requires_grad_()
    torch.library.opcheck(operators.rotate.default, (q, k, *p.flat(), p.pairs, False, False))
    arguments = (p.q, p.k, *p.flat(), p.pairs, True, False)
    torch.library.opcheck(operators.rotate_.default, arguments)


def test_compiled_code_calls_the_operator_when_asked_and_fuses_the_twin_otherwise() -> None:
    p = problem(kind="rates")

    def turn(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_qk(q * 1, k * 1, pairs=p.pairs, layout="half", in_place=True, **p.angles())

    for choice, count in (("kernel", 1), ("auto", 0)):
        graphs: list[Any] = []

        def keep(graph: Any, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        with using(rotary=choice), torch.no_grad():  # type: ignore[arg-type]
            found = torch.compile(turn, backend=keep, fullgraph=True)(p.q, p.k)
        calls = [node for node in graphs[0].graph.nodes if "rotate_" in str(node.target)]
        assert len(calls) == count
        assert_turned(found, answer(p), torch.float32)


def test_an_unknown_kernel_or_choice_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(TrisectError, match="rotary"), using(rotery="plain"):
        pass
    with pytest.raises(TrisectError, match="plain"), using(rotary="fast"):  # type: ignore[arg-type]
        pass
