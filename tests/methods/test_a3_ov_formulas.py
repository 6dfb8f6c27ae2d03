"""A3's OV solver and its ablations, against the paper's formulas at full size.    [math.md, section 4]"""

from dataclasses import replace

import pytest
import torch
from a3_oracles import (
    assert_same,
    check_curve,
    fused_vo,
    mean_output_error,
    near,
    paper_vo,
    resolved,
    root_of,
    truncated,
    with_one,
    with_row,
)
from a3_problems import Draw, OVProblem, Size, few, mha_sizes, narrower, ov_problem, project, sizes, solution_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trisect.errors import TrisectError

pytestmark = pytest.mark.usefixtures("one_thread")


@few
@given(size=mha_sizes, data=st.data())
def test_ov_is_the_svd_of_the_attention_weighted_whitened_weights_head_by_head(size: Size, data: st.DataObject):
    rank = narrower(size, data)
    problem = ov_problem(size)
    P = with_one(problem.P, problem.part.b_v)
    check_ov("a3", problem, P, rank=rank)


@pytest.mark.parametrize(("method", "strategy"), [("a3", sizes), ("a3-xkv", mha_sizes)])
@few
@given(data=st.data())
def test_shared_value_heads_and_the_xkv_ablation_use_the_values_before_attention(
    method: str, strategy: st.SearchStrategy[Size], data: st.DataObject
):
    size = data.draw(strategy)
    size = replace(size, group=2) if method == "a3" else size
    rank = narrower(size, data)
    problem = ov_problem(size)
    X = with_one(problem.X, problem.part.b_v)
    check_ov(method, problem, X.expand(size.heads, -1, -1), rank=rank)


def check_ov(method: str, problem: OVProblem, inputs: Tensor, *, rank: int) -> None:
    """Outputs, loss and total against the paper's SVD; `inputs` (h, t, D) are what the moment is made of."""
    part = problem.part
    W_vo = fused_vo(part)
    roots = [root_of(X) for X in inputs[:: part.group]]
    expected, loss = paper_vo(W_vo, roots, group=part.group, rank=rank)
    solution = solution_of(method, "ov", part, problem.moments, rank)
    narrow = solution.part
    assert narrow.W_v.shape[-1] == narrow.W_o.shape[1] == rank
    assert narrow.b_o is part.b_o
    dense, got = inputs @ W_vo, inputs @ fused_vo(narrow)
    assert_same(got, inputs @ expected, dense=dense, tolerance=resolved(solution))
    total = mean_output_error(dense, torch.zeros_like(dense))
    assert solution.loss == near(loss, total)
    assert solution.loss == near(mean_output_error(dense, got), total)
    assert solution.total == pytest.approx(total, rel=1e-8)


@few
@given(size=mha_sizes)
def test_no_nearby_value_and_output_weights_of_the_same_width_do_better(size: Size):
    problem = ov_problem(replace(size, spread=1.0))
    part = problem.part
    solution = solution_of("a3", "ov", part, problem.moments, size.width // 2)
    P = with_one(problem.P, part.b_v)
    dense = P @ fused_vo(part)
    draw = Draw(size.seed + 1)
    for step in (1e-4, 1e-2, 0.3):
        for _ in range(5):
            rival = replace(
                solution.part,
                W_v=solution.part.W_v * (1 + step * draw(*solution.part.W_v.shape)),
                W_o=solution.part.W_o * (1 + step * draw(*solution.part.W_o.shape)),
            )
            error = mean_output_error(dense, P @ fused_vo(rival))
            assert error >= solution.loss - 1e-12 * solution.total


@few
@given(size=mha_sizes, data=st.data())
def test_ov_overall_is_the_svd_of_all_heads_stacked(size: Size, data: st.DataObject):
    width = narrower(size, data)
    size = replace(size, d_model=min(size.d_model, 16), tokens=150)
    h, D, d = size.heads, size.d_model, size.width
    problem = ov_problem(size)
    part = problem.part
    rank = min(round(2 * h * width / (h + 1)), h * d)
    # [P_1 ... P_h] [W_vo,1; ...; W_vo,h]; the constant channel is the same for all heads and comes once.
    P_cat = torch.cat(list(problem.P), dim=-1)
    W_cat = (part.W_v @ part.W_o).flatten(0, 1)
    if part.b_v is not None:
        P_cat = with_one(P_cat, part.b_v)
        W_cat = with_row(W_cat, (part.b_v.unsqueeze(1) @ part.W_o).sum(dim=(0, 1)))
    R = root_of(P_cat)
    approximation, s = truncated(R.root @ W_cat, min(rank, D))
    expected, dense = P_cat @ R.inverse @ approximation, P_cat @ W_cat

    solution = solution_of("a3-ov-overall", "ov", part, problem.moments, width)
    narrow = solution.part
    assert narrow.W_v.shape == (h, D, rank)
    assert narrow.W_o.shape == (1, rank, D)
    got = project(problem.P, narrow.W_v, narrow.b_v).sum(dim=0) @ narrow.W_o[0]
    assert_same(got.unsqueeze(0), expected.unsqueeze(0), dense=dense.unsqueeze(0), tolerance=resolved(solution))
    total = s.square().sum().item()
    assert solution.loss == near(s[rank:].square().sum().item(), total)
    assert solution.loss == near(mean_output_error(dense.unsqueeze(0), got.unsqueeze(0)), total)
    assert solution.total == pytest.approx(total, rel=1e-8)


def test_ov_overall_keeps_no_more_weights_than_the_width_it_was_asked_for():
    for h, width in ((1, 3), (2, 4), (4, 3)):
        problem = ov_problem(Size(kv_heads=h))
        narrow = solution_of("a3-ov-overall", "ov", problem.part, problem.moments, width).part
        asked = 2 * h * width * 12
        assert abs(narrow.W_v.numel() + narrow.W_o.numel() - asked) <= (h + 1) * 12 / 2


def test_ov_overall_refuses_shared_value_heads():
    problem = ov_problem(Size(group=2))
    with pytest.raises(TrisectError, match="--method a3"):
        solution_of("a3-ov-overall", "ov", problem.part, problem.moments, 2)


def test_the_sum_of_head_errors_is_no_bound_on_the_error_of_the_sum():
    """The paper bounds |O - O~|^2 by the sum of |O_i - O_i~|^2; twin heads exceed it by their number."""
    problem = ov_problem(Size(kv_heads=2))
    twins = replace(
        problem.part, W_v=problem.part.W_v[:1].expand(2, -1, -1), W_o=problem.part.W_o[:1].expand(2, -1, -1)
    )
    moments = {"a": problem.moments["a"][:1].expand(2, -1, -1)}
    solution = solution_of("a3", "ov", twins, moments, 3)
    P = problem.P[:1].expand(2, -1, -1)
    error = (P @ (fused_vo(twins) - fused_vo(solution.part))).sum(dim=0)
    assert error.square().sum(dim=-1).mean().item() == pytest.approx(2 * solution.loss, rel=1e-8)


@few
@given(size=sizes)
def test_ov_loss_never_rises_with_width_and_full_width_computes_the_same_outputs(size: Size):
    problem = ov_problem(size)
    solutions = [solution_of("a3", "ov", problem.part, problem.moments, w) for w in range(1, size.width + 1)]
    check_curve(solutions)
    P = with_one(problem.P, problem.part.b_v)
    dense = P @ fused_vo(problem.part)
    whole = P @ fused_vo(solutions[-1].part)
    assert_same(whole, dense, dense=dense, tolerance=resolved(solutions[-1]))
