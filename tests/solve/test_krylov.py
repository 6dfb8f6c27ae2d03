"""Directions for large least-squares problems, against the problem solved whole."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trisect.solve.ridge import Metric, krylov


def problem(seed: int, D: int, N: int) -> tuple[torch.Tensor, torch.Tensor, Metric]:
    """J (rows, D N), what is missing (rows,), and a metric."""
    draw = torch.Generator().manual_seed(seed)
    J = torch.randn(40, D * N, generator=draw, dtype=torch.float64)
    r = torch.randn(40, generator=draw, dtype=torch.float64)
    root = torch.randn(D, D, generator=draw, dtype=torch.float64)
    return J, r, Metric.damped(root @ root.mT, 0.5 + torch.rand(N, generator=draw, dtype=torch.float64))


@settings(max_examples=20)
@given(seed=st.integers(0, 99), D=st.integers(1, 4), N=st.integers(1, 4), ridge=st.sampled_from([1e-3, 1.0, 30.0]))
def test_with_all_directions_every_ridge_has_the_answer_of_the_whole_problem(
    seed: int, D: int, N: int, ridge: float
) -> None:
    J, r, metric = problem(seed, D, N)
    found = krylov((J.mT @ r).reshape(D, N), lambda v: (J.mT @ (J @ v.flatten())).reshape(D, N), metric, D * N)
    steps = torch.linalg.solve(found.gram + ridge * found.penalty, found.cross)
    answer = torch.tensordot(steps, found.vectors, dims=1)
    M = torch.kron(metric.inputs, torch.diag(metric.outputs))  # of weights flattened row by row
    whole = torch.linalg.solve(J.mT @ J + ridge * M, J.mT @ r).reshape(D, N)
    torch.testing.assert_close(answer, whole, rtol=1e-6, atol=1e-8)


def test_few_directions_do_better_than_as_many_steps_down_the_gradient_and_are_orthonormal() -> None:
    J, r, metric = problem(0, 4, 4)
    product = lambda v: (J.mT @ (J @ v.flatten())).reshape(4, 4)  # noqa: E731
    found = krylov((J.mT @ r).reshape(4, 4), product, metric, 4)
    torch.testing.assert_close(found.penalty, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-9)
    answer = torch.tensordot(torch.linalg.solve(found.gram, found.cross), found.vectors, dims=1)
    v = torch.zeros(4, 4, dtype=torch.float64)
    for _ in range(4):
        slope = metric.raiser()((J.mT @ (r - J @ v.flatten())).reshape(4, 4))
        change = J @ slope.flatten()
        v = v + (change @ (r - J @ v.flatten())) / (change @ change) * slope
    assert (r - J @ answer.flatten()).norm() < 0.999 * (r - J @ v.flatten()).norm()


def test_where_nothing_is_missing_there_is_no_direction() -> None:
    J, _, metric = problem(0, 2, 3)
    found = krylov(torch.zeros(2, 3, dtype=torch.float64), lambda v: v, metric, 4)
    assert found.vectors.shape == (0, 2, 3)
    assert found.gram.shape == found.penalty.shape == (0, 0)
