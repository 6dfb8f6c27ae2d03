"""Small random linear maps for the baselines: the tokens they see and every moment of those tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from a3_problems import Draw, Size
from hypothesis import strategies as st
from torch import Tensor

from trisect.methods import METHODS
from trisect.methods.method import Options
from trisect.records.parts import INPUTS, Factored, Linear

FACTORED = ("svd", "fwsvd", "asvd", "svd-llm", "svd-llm-sequential", "svd-llm-v2", "palu")
MASKED = ("wanda-sparse", "wanda-2:4", "wanda-4:8")


@dataclass(frozen=True, kw_only=True)
class LinearProblem:
    part: Linear
    X: Tensor  # (t, in) what the dense model feeds it
    X_narrow: Tensor  # (t, in) what the layers cut so far feed it
    gradients: Tensor  # (samples, in, out)
    moments: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class LinearSize:
    seed: int = 0
    name: str = "q"
    inputs: int = 10
    outputs: int = 8
    heads: int = 1
    tokens: int = 60
    spread: float = 1.0
    bias: bool = False

    @property
    def full(self) -> int:
        return min(self.inputs, self.outputs)


linear_sizes = st.builds(
    LinearSize,
    seed=st.integers(0, 2**31 - 1),
    name=st.sampled_from(sorted(INPUTS)),
    inputs=st.integers(3, 12),
    outputs=st.integers(3, 12),
    spread=st.sampled_from([1.0, 1e2, 1e4]),
    bias=st.booleans(),
)


def linear_problem(size: LinearSize) -> LinearProblem:
    draw = Draw(size.seed)
    X = draw.inputs(Size(d_model=size.inputs, tokens=size.tokens, spread=size.spread))
    X_narrow = X + 0.3 * X.std() * draw(*X.shape)
    gradients = draw(5, size.inputs, size.outputs) * draw(size.inputs, 1)
    part = Linear(
        name=size.name, W=draw(size.inputs, size.outputs), b=draw(size.outputs) if size.bias else None, heads=size.heads
    )
    source = INPUTS[size.name]
    moments = {
        f"{source}_gram": X.mT @ X / len(X),
        f"narrow_{source}_gram": X_narrow.mT @ X_narrow / len(X),
        f"{source}_abs": X.abs().mean(dim=0),
        f"{source}_energy": X.square().mean(dim=0),
        f"{size.name}_fisher": gradients.square().mean(dim=0).sum(dim=-1),
    }
    return LinearProblem(part=part, X=X, X_narrow=X_narrow, gradients=gradients, moments=moments)


def solved(method: str, problem: LinearProblem, width: int) -> Any:
    """The solver itself, without the full-width shortcut of `solve`."""
    solver = METHODS[method].solvers[problem.part.name]
    return solver(problem.part, problem.moments, width, Options())


def product(solution: Factored) -> Tensor:
    """A B as one (in, out) matrix, B block-diagonal."""
    return solution.A.double() @ torch.block_diag(*solution.B.double())


def mean_square(X: Tensor, W: Tensor) -> float:
    """E|x W|^2."""
    return (X @ W).square().sum(dim=-1).mean().item()
