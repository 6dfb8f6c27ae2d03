"""Wanda's masks against sorted loops, and the diagonal estimate of their loss.             [math.md L-9]"""

from dataclasses import replace

import pytest
import torch
from a3_problems import few
from baseline_problems import LinearProblem, LinearSize, linear_problem, linear_sizes, mean_square, solved
from hypothesis import given
from hypothesis import strategies as st

from trisect.methods import METHODS
from trisect.methods.baselines import kept_per_output
from trisect.records.parts import INPUTS

pytestmark = pytest.mark.usefixtures("one_thread")


def column_scores(problem: LinearProblem, column: int) -> list[float]:
    norms = problem.X.square().mean(dim=0).sqrt().tolist()
    return [abs(w) * norm for w, norm in zip(problem.part.W[:, column].tolist(), norms, strict=True)]


@few
@given(size=linear_sizes, data=st.data())
def test_every_output_keeps_its_own_largest_scores(size: LinearSize, data: st.DataObject) -> None:
    problem = linear_problem(size)
    keep = data.draw(st.integers(1, size.inputs))
    solution = solved("wanda-sparse", problem, keep)
    lost = 0.0
    for column in range(size.outputs):
        scores = column_scores(problem, column)
        order = sorted(range(size.inputs), key=lambda i: (-scores[i], i))
        for rank, i in enumerate(order):
            expected = problem.part.W[i, column] if rank < keep else 0.0
            assert solution.W[i, column] == expected
        lost += sum(scores[i] ** 2 for i in order[keep:])
    assert solution.loss == pytest.approx(lost, abs=1e-12 * solution.total)
    assert solution.zeros == size.outputs * (size.inputs - keep)
    assert solution.name == size.name


@pytest.mark.parametrize(("method", "n", "m"), [("wanda-2:4", 2, 4), ("wanda-4:8", 4, 8)])
@few
@given(size=linear_sizes)
def test_n_of_every_m_inputs_stay(method: str, n: int, m: int, size: LinearSize) -> None:
    problem = linear_problem(replace(size, inputs=size.inputs + 6))
    inputs = size.inputs + 6
    solution = solved(method, problem, inputs // 2)
    for column in range(size.outputs):
        scores = column_scores(problem, column)
        for start in range(0, inputs, m):
            block = range(start, min(start + m, inputs))
            kept = sorted(block, key=lambda i: (-scores[i], i))[:n]
            for i in block:
                assert solution.W[i, column] == (problem.part.W[i, column] if i in kept else 0.0)


def test_blocks_of_m_lose_exactly_half() -> None:
    problem = linear_problem(LinearSize(inputs=16, outputs=5))
    for method in ("wanda-2:4", "wanda-4:8"):
        assert solved(method, problem, 8).zeros == 8 * 5
        assert METHODS[method].ratio == 0.5


def test_equal_scores_keep_the_lower_input() -> None:
    problem = linear_problem(LinearSize(inputs=8, outputs=3))
    ones = replace(problem, part=replace(problem.part, W=torch.ones(8, 3)), moments={"x_energy": torch.ones(8)})
    assert solved("wanda-sparse", ones, 3).W[:, 0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert solved("wanda-2:4", ones, 4).W[:, 0].tolist() == [1, 1, 0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("method", ["wanda-sparse", "wanda-2:4", "wanda-4:8"])
def test_the_loss_is_exact_for_uncorrelated_inputs(method: str) -> None:
    problem = linear_problem(LinearSize(inputs=16, outputs=6, tokens=64))
    Q = torch.linalg.qr(problem.X).Q  # columns orthogonal: a diagonal Gram
    X = Q * torch.linspace(1, 9, 16, dtype=torch.float64)
    problem = replace(problem, X=X, moments={"x_energy": X.square().mean(dim=0)})
    solution = solved(method, problem, 8)
    assert solution.loss == pytest.approx(mean_square(X, problem.part.W - solution.W))
    assert solution.total == pytest.approx(mean_square(X, problem.part.W))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", ["wanda-sparse", "wanda-2:4", "wanda-4:8"])
def test_kept_weights_are_the_very_bits(method: str, dtype: torch.dtype) -> None:
    problem = linear_problem(LinearSize(inputs=16))
    part = replace(problem.part, W=problem.part.W.to(dtype))
    W = solved(method, replace(problem, part=part), 8).W
    assert W.dtype == dtype
    assert W[W != 0].equal(part.W[W != 0])


def test_all_linear_maps_have_a_mask_and_shapes_stay() -> None:
    for method in ("wanda-sparse", "wanda-2:4", "wanda-4:8"):
        assert set(METHODS[method].solvers) == set(INPUTS)
        assert METHODS[method].masks
        assert METHODS[method].reads["o"] == {"a_energy"}


def test_weights_kept_per_output() -> None:
    assert [kept_per_output(10, 99, 1, ratio) for ratio in (0.0, 0.3, 0.5, 0.7, 0.99)] == [10, 7, 5, 3, 1]
