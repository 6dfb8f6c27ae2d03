"""The weighted SVDs against what their papers print, in float64.                        [math.md L-2 to L-5]

The papers write y = W x; their W is the transpose of ours, and so is every product below.
"""

from dataclasses import replace

import pytest
import torch
from a3_oracles import near, truncated
from a3_problems import few
from baseline_problems import LinearSize, linear_problem, linear_sizes, mean_square, product, solved
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trisect.methods.baselines import equal_parameters_rank
from trisect.pipeline.rank_search import leading

pytestmark = pytest.mark.usefixtures("one_thread")


def some_rank(size: LinearSize, data: st.DataObject) -> int:
    return data.draw(st.integers(1, size.full))


def same(actual: Tensor, expected: Tensor, *, tolerance: float = 1e-7) -> None:
    assert (actual - expected).norm() <= tolerance * expected.norm().clamp(min=1e-12)


@few
@given(size=linear_sizes, data=st.data())
def test_svd_is_the_truncated_svd(size: LinearSize, data: st.DataObject) -> None:
    problem, rank = linear_problem(size), some_rank(size, data)
    expected, s = truncated(problem.part.W, rank)
    solution = solved("svd", problem, rank)
    same(product(solution), expected)
    assert solution.loss == near(s[rank:].square().sum().item(), solution.total)
    assert solution.total == pytest.approx(problem.part.W.square().sum().item())


@few
@given(size=linear_sizes, data=st.data())
def test_fwsvd_weighs_rows_by_the_root_of_their_summed_fisher_information(
    size: LinearSize, data: st.DataObject
) -> None:
    problem, rank = linear_problem(size), some_rank(size, data)
    fisher = torch.zeros(size.inputs, size.outputs, dtype=torch.float64)
    for gradient in problem.gradients:
        fisher += gradient**2 / len(problem.gradients)
    I_hat = torch.diag(torch.tensor([row.sum().sqrt() for row in fisher], dtype=torch.float64))
    weighted, s = truncated(I_hat @ problem.part.W, rank)
    solution = solved("fwsvd", problem, rank)
    same(product(solution), torch.linalg.inv(I_hat) @ weighted)
    assert solution.loss == near(s[rank:].square().sum().item(), solution.total)


@few
@given(size=linear_sizes, data=st.data())
def test_asvd_scales_inputs_by_the_root_of_their_mean_magnitude(size: LinearSize, data: st.DataObject) -> None:
    problem, rank = linear_problem(size), some_rank(size, data)
    S = torch.diag(problem.X.abs().mean(dim=0) ** 0.5)
    scaled, _ = truncated(problem.part.W.mT @ S, rank)
    same(product(solved("asvd", problem, rank)).mT, scaled @ torch.linalg.inv(S))


@few
@given(size=linear_sizes, data=st.data())
def test_a_smaller_rank_is_the_beginning_of_a_larger_one(size: LinearSize, data: st.DataObject) -> None:
    problem, rank = linear_problem(size), some_rank(size, data)
    same(product(leading(solved("asvd", problem, size.full), rank)), product(solved("asvd", problem, rank)))


@pytest.mark.parametrize("method", ["svd-llm", "svd-llm-v2"])
@few
@given(size=linear_sizes, data=st.data())
def test_whitening_with_a_cholesky_factor_gives_the_same_product(
    method: str, size: LinearSize, data: st.DataObject
) -> None:
    problem, rank = linear_problem(size), some_rank(size, data)
    X = problem.X.mT  # (in, t), as in the paper
    S = torch.linalg.cholesky(X @ X.mT)
    whitened, s = truncated(problem.part.W.mT @ S, rank)
    solution = solved(method, problem, rank)
    same(product(solution).mT, whitened @ torch.linalg.inv(S), tolerance=1e-6)
    # The paper's sums run over all tokens, ours are means.
    assert solution.loss * len(problem.X) == near(s[rank:].square().sum().item(), s.square().sum().item())


@few
@given(size=linear_sizes, data=st.data())
def test_v2_is_svd_llms_optimum_by_two_svds(size: LinearSize, data: st.DataObject) -> None:
    problem, rank = linear_problem(size), some_rank(size, data)
    X = problem.X.mT
    U_s, S_s, _ = torch.linalg.svd(X @ X.mT)
    D, _ = truncated(problem.part.W.mT @ U_s @ S_s.sqrt().diag(), rank)
    expected = D @ S_s.rsqrt().diag() @ U_s.mT
    same(product(solved("svd-llm-v2", problem, rank)).mT, expected, tolerance=1e-6)


@pytest.mark.parametrize("method", ["svd-llm", "svd-llm-v2"])
@few
@given(size=linear_sizes, data=st.data())
def test_predicted_loss_is_the_mean_squared_error_on_the_tokens(
    method: str, size: LinearSize, data: st.DataObject
) -> None:
    problem, rank = linear_problem(size), some_rank(size, data)
    solution = solved(method, problem, rank)
    W = problem.part.W
    assert solution.total == pytest.approx(mean_square(problem.X, W))
    assert solution.loss == near(mean_square(problem.X, W - product(solution)), solution.total)


@few
@given(size=linear_sizes, data=st.data(), seed=st.integers(0, 2**31 - 1))
def test_nothing_of_the_same_rank_is_closer_on_the_tokens_than_svd_llm(
    size: LinearSize, data: st.DataObject, seed: int
) -> None:
    problem, rank = linear_problem(size), some_rank(size, data)
    solution, W = solved("svd-llm", problem, rank), problem.part.W
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(size.inputs, rank, generator=generator, dtype=torch.float64)
    B = torch.linalg.lstsq(problem.X @ A, problem.X @ W).solution
    assert mean_square(problem.X, W - A @ B) >= solution.loss * (1 - 1e-9)
    for rival in ("svd", "fwsvd", "asvd"):
        other = mean_square(problem.X, W - product(solved(rival, problem, rank)))
        assert other >= solution.loss * (1 - 1e-9) - 1e-12 * solution.total


# -- the sequential update ---------------------------------------------------------------------------------


@few
@given(size=linear_sizes, data=st.data())
def test_the_update_is_least_squares_on_the_narrow_streams_inputs(size: LinearSize, data: st.DataObject) -> None:
    problem, rank = linear_problem(size), some_rank(size, data)
    A, W, X = solved("svd-llm", problem, rank).A, problem.part.W, problem.X_narrow
    updated = torch.linalg.lstsq(X @ A, X @ W).solution
    solution = solved("svd-llm-sequential", problem, rank)
    assert solution.A.equal(A)
    outputs, expected = X @ product(solution), X @ A @ updated
    assert (outputs - expected).norm() <= 1e-4 * (X @ W).norm()
    assert solution.loss == near(mean_square(X, W - product(solution)), solution.total)
    assert solution.total == pytest.approx(mean_square(X, W))
    before = mean_square(X, W - product(solved("svd-llm", problem, rank)))
    assert solution.loss <= before + 1e-12 * solution.total


def test_without_layers_cut_before_there_is_nothing_to_update() -> None:
    problem = linear_problem(LinearSize())
    moments = {**problem.moments, "narrow_x_gram": problem.moments["x_gram"]}
    same(
        product(solved("svd-llm-sequential", replace(problem, moments=moments), 4)),
        product(solved("svd-llm", problem, 4)),
    )


@pytest.mark.parametrize("tokens", [0, 2, 4])
def test_with_few_narrow_tokens_the_update_is_the_smallest_that_fits_them(tokens: int) -> None:
    """Smallest in each feature's own unit: directions the narrow stream never shows keep their B."""
    problem = linear_problem(LinearSize(inputs=10, outputs=8))
    W, dense, X = problem.part.W, solved("svd-llm", problem, 5), problem.X_narrow[:tokens]
    moments = {**problem.moments, "narrow_x_gram": X.mT @ X / max(1, tokens)}
    found = solved("svd-llm-sequential", replace(problem, moments=moments), 5)
    features, before = X @ dense.A, dense.B[0]
    unit = features.square().sum(dim=0).clamp(min=1e-12).rsqrt().diag()
    step = unit @ torch.linalg.pinv(features @ unit) @ (X @ W - features @ before)
    same(found.B[0], before + step, tolerance=1e-4)


def test_rounding_in_a_gram_of_few_tokens_is_not_fitted() -> None:
    """Grams are summed from float32 batches: their small eigenvalues are rounding of either sign."""
    problem = linear_problem(LinearSize(inputs=12, outputs=9, tokens=80))
    X, W = problem.X_narrow[:4], problem.part.W
    noise = torch.randn(12, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    gram = X.mT @ X / 4
    gram = gram + 1e-8 * gram.diagonal().mean() * (noise + noise.mT)
    moments = {**problem.moments, "narrow_x_gram": gram}
    found = solved("svd-llm-sequential", replace(problem, moments=moments), 8)
    assert found.B.norm() <= 3 * solved("svd-llm", problem, 8).B.norm()
    same(X @ product(found), X @ W, tolerance=1e-2)


# -- ranks -------------------------------------------------------------------------------------------------


@few
@given(inputs=st.integers(2, 400), outputs=st.integers(2, 400), ratio=st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.9]))
def test_the_rank_is_the_largest_that_keeps_the_parameters_within_the_ratio(
    inputs: int, outputs: int, ratio: float
) -> None:
    allowed = [
        rank
        for rank in range(1, min(inputs, outputs) + 1)
        if rank * (inputs + outputs) <= (1 - ratio) * inputs * outputs + 1e-6
    ]
    assert equal_parameters_rank(inputs, outputs, 1, ratio) == max(allowed, default=1)
