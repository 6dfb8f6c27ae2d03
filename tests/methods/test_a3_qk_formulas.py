"""A3's QK solver without RoPE, against the paper's formulas at full size.    [math.md, sections 2-3]"""

from dataclasses import replace

import pytest
import torch
from a3_oracles import (
    QK_METHODS,
    assert_same,
    check_curve,
    fused_qk,
    mean_score_error,
    near,
    paper_qk,
    qk_scores,
    resolved,
    root_of,
    with_one,
)
from a3_problems import Draw, Size, few, narrower, qk_problem, sizes, solution_of
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("method", QK_METHODS)
@few
@given(size=sizes, data=st.data())
def test_qk_without_rope_is_the_joint_svd_of_the_whitened_fused_weights(method: str, size: Size, data: st.DataObject):
    rank = narrower(size, data)
    problem = qk_problem(size)
    part = problem.part
    X_q, X_k = with_one(problem.X_q, part.b_q), with_one(problem.X_k, part.b_k)
    q_root, k_root = QK_METHODS[method]
    R_q, R_k = q_root(X_q), k_root(X_k)
    W_qk = fused_qk(part)
    expected, loss = paper_qk(W_qk, R_q, R_k, group=part.group, rank=rank)
    solution = solution_of(method, "qk", part, problem.moments, rank)

    # The tokens a side is judged on: the calibration's, or the identity's where the ablation says so.
    left = X_q if q_root is root_of else torch.eye(X_q.shape[1], dtype=X_q.dtype)
    right = X_k if k_root is root_of else torch.eye(X_k.shape[1], dtype=X_k.dtype)
    dense = left @ W_qk @ right.mT
    assert_same(
        left @ fused_qk(solution.part) @ right.mT, left @ expected @ right.mT, dense=dense, tolerance=resolved(solution)
    )
    total = (R_q.root @ W_qk @ R_k.root).square().sum().item()
    assert solution.loss == near(loss, total)
    assert solution.total == pytest.approx(total, rel=1e-8)


@few
@given(size=sizes, data=st.data())
def test_qk_loss_is_the_mean_squared_score_error_over_query_key_pairs_summed_over_heads(
    size: Size, data: st.DataObject
):
    rank = narrower(size, data)
    problem = qk_problem(size)
    solution = solution_of("a3", "qk", problem.part, problem.moments, rank)
    dense, narrow = (qk_scores(p, problem.X_q, problem.X_k) for p in (problem.part, solution.part))
    assert solution.loss == near(mean_score_error(dense, narrow), solution.total)
    assert solution.total == pytest.approx(mean_score_error(dense, torch.zeros_like(dense)), rel=1e-8)


@few
@given(size=sizes)
def test_no_nearby_query_and_key_weights_of_the_same_width_do_better(size: Size):
    problem = qk_problem(replace(size, spread=1.0))
    solution = solution_of("a3", "qk", problem.part, problem.moments, size.width // 2)
    dense = qk_scores(problem.part, problem.X_q, problem.X_k)
    draw = Draw(size.seed + 1)
    for step in (1e-4, 1e-2, 0.3):
        for _ in range(5):
            rival = replace(
                solution.part,
                W_q=solution.part.W_q * (1 + step * draw(*solution.part.W_q.shape)),
                W_k=solution.part.W_k * (1 + step * draw(*solution.part.W_k.shape)),
            )
            error = mean_score_error(dense, qk_scores(rival, problem.X_q, problem.X_k))
            assert error >= solution.loss - 1e-12 * solution.total


@pytest.mark.parametrize("pairs", [0, 1, 3])
@few
@given(size=sizes)
def test_qk_loss_never_rises_with_width_and_full_width_computes_the_same_scores(pairs: int, size: Size):
    problem = qk_problem(replace(size, width=6), pairs=pairs)
    step = 2 if pairs == 3 else 1
    solutions = [solution_of("a3", "qk", problem.part, problem.moments, w) for w in range(step, 7, step)]
    check_curve(solutions)
    dense, whole = (qk_scores(p, problem.X_q, problem.X_k) for p in (problem.part, solutions[-1].part))
    assert_same(whole, dense, dense=dense, tolerance=resolved(solutions[-1]))


@few
@given(size=sizes, tokens=st.integers(8, 10))
def test_moments_of_fewer_tokens_than_channels_still_predict_the_measured_loss(size: Size, tokens: int):
    problem = qk_problem(replace(size, width=6, tokens=tokens, d_model=12, bias=False, spread=1.0))
    keys = tokens - 7  # fewer than the head is wide
    assert keys < 6
    solution = solution_of("a3", "qk", problem.part, problem.moments, 2)
    assert solution.clipped == pytest.approx(1 - keys / 6)
    dense, narrow = (qk_scores(p, problem.X_q, problem.X_k) for p in (problem.part, solution.part))
    assert solution.loss == near(mean_score_error(dense, narrow), solution.total)
