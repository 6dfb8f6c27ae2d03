"""Kernels run without their operators where nobody looks on, and do the same; who looks on sees operators."""

from typing import Any

import pytest
import torch
from rotations import problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trisect.kernels import rotate_qk, using
from trisect.kernels.elementwise import gated
from trisect.kernels.operators import may_launch

KINDS = ("index", "rates", "shared")


class Seen(TorchDispatchMode):
    """Notes which operations are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of our operators that were called: torch finds those that are set here before its own."""
    names: list[str] = []
    for name in ("rotate_", "gated"):
        operator = getattr(torch.ops.trisect, name)

        def noted(*args: Any, name: str = name, operator: Any = operator) -> Any:
            names.append(name)
            return operator(*args)

        monkeypatch.setattr(torch.ops.trisect, name, noted)
    return names


def turned(one: Any) -> tuple[Tensor, Tensor]:
    with using(rotary="kernel"):
        return rotate_qk(
            one.q.clone(), one.k.clone(), pairs=one.pairs, layout=one.layout, in_place=True, **one.angles()
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_rotation_nobody_watches_gives_what_the_operator_gives(kind: str, called: list[str]) -> None:
    one = problem(kind=kind, rest=2, strided=True)
    watched = turned(one)
    assert called == ["rotate_"]
    with torch.no_grad():
        alone = turned(one)
    assert called == ["rotate_"]
    for found, expected in zip(alone, watched, strict=True):
        assert torch.equal(found, expected)


def test_a_gate_nobody_watches_gives_what_the_operator_gives(called: list[str]) -> None:
    y = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(0))
    with using(gate="kernel"):
        watched = gated(y)
        with torch.no_grad():
            alone = gated(y)
    assert called == ["gated"]
    assert torch.equal(alone, watched)


def test_who_counts_operations_sees_the_operators() -> None:
    one = problem()
    with torch.no_grad(), Seen() as seen, using(gate="kernel"):
        turned(one)
        gated(torch.ones(2, 4))
    assert {"trisect::rotate_", "trisect::gated"} <= set(seen.names)


def test_gradients_and_other_kinds_of_tensors_are_somebody_watching() -> None:
    x = torch.ones(2)
    assert not may_launch(x)
    with torch.no_grad():
        assert may_launch(x)
        assert not may_launch(torch.nn.Parameter(x))
    with torch.inference_mode():
        assert may_launch(x)


def test_a_compiled_model_calls_the_operator() -> None:
    def step(y: Tensor) -> Tensor:
        with using(gate="kernel"):
            return gated(y)

    graphs: list[str] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    with torch.no_grad():
        torch.compile(step, backend=keep, fullgraph=True)(torch.ones(2, 4))
    assert any("trisect.gated" in code for code in graphs)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_too_both_ways_agree(kind: str) -> None:
    one = problem(kind=kind, rest=2, strided=True, dtype=torch.bfloat16, device="cuda")
    y = torch.randn(3, 1, 640, device="cuda", dtype=torch.bfloat16)
    watched = *turned(one), gated(y)
    with torch.no_grad():
        alone = *turned(one), gated(y)
    for found, expected in zip(alone, watched, strict=True):
        assert torch.equal(found, expected)
