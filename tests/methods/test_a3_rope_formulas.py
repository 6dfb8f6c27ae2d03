"""A3's QK solver with RoPE and QK-norm, against the paper's formulas at full size.    [math.md, section 3]"""

from dataclasses import replace

import pytest
import torch
from a3_oracles import (
    QK_METHODS,
    assert_same,
    fused_qk,
    near,
    paper_channel_scores,
    paper_qk,
    resolved,
    root_of,
    with_one,
)
from a3_problems import Size, few, heads_gram, normed_problem, qk_problem, sizes, solution_of
from hypothesis import given
from hypothesis import strategies as st

from trisect.models.heads import to_canonical
from trisect.records.parts import QK

pytestmark = pytest.mark.usefixtures("one_thread")


# -- QK with RoPE ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", QK_METHODS)
@few
@given(size=sizes, data=st.data())
def test_rope_keeps_the_pairs_with_the_largest_summed_channel_scores(method: str, size: Size, data: st.DataObject):
    pairs = data.draw(st.integers(1, 4))
    p = data.draw(st.integers(0, pairs))
    problem = qk_problem(replace(size, width=2 * pairs), pairs=pairs)
    part = problem.part
    q_root, k_root = QK_METHODS[method]
    channels = paper_channel_scores(
        problem, q_root(with_one(problem.X_q, part.b_q)), k_root(with_one(problem.X_k, part.b_k))
    )
    scores = channels[:, :pairs] + channels[:, pairs:]
    solution = solution_of(method, "qk", part, problem.moments, 2 * p)
    for head in range(size.kv_heads):
        kept = sorted(sorted(range(pairs), key=lambda i: -scores[head, i].item())[:p])
        assert solution.part.frequencies[head].tolist() == part.frequencies[head, kept].tolist()
        both = kept + [i + pairs for i in kept]
        queries = slice(head * size.group, (head + 1) * size.group)
        # Bit for bit the old columns: the paper's 1 / (r lambda) is never applied.
        assert solution.part.W_k[head].equal(part.W_k[head][:, both])
        assert solution.part.W_q[queries].equal(part.W_q[queries][:, :, both])
        if part.b_q is not None and part.b_k is not None:
            assert solution.part.b_k is not None
            assert solution.part.b_q is not None
            assert solution.part.b_k[head].equal(part.b_k[head, both])
            assert solution.part.b_q[queries].equal(part.b_q[queries][:, both])
    total = scores.sum().item()
    largest = scores.sort(dim=-1, descending=True).values
    assert solution.loss == near(largest[:, p:].sum().item(), total)
    assert solution.total == pytest.approx(total, rel=1e-8)


@few
@given(size=sizes, p=st.integers(1, 2))
def test_adjacent_pairs_in_canonical_order_are_scored_as_the_paper_prints_them(size: Size, p: int):
    pairs = 3
    problem = qk_problem(replace(size, width=2 * pairs, bias=False), pairs=pairs)
    adjacent = problem.part  # read its channels as (2 i, 2 i + 1)
    channels = paper_channel_scores(problem, root_of(problem.X_q), root_of(problem.X_k))
    scores = channels[:, 0::2] + channels[:, 1::2]
    canonical = replace(
        adjacent, W_q=to_canonical(adjacent.W_q, pairs, "adjacent"), W_k=to_canonical(adjacent.W_k, pairs, "adjacent")
    )
    q, k = problem.X_q @ canonical.W_q, problem.X_k @ canonical.W_k
    solution = solution_of("a3", "qk", canonical, {"q": heads_gram(q), "k": heads_gram(k)}, 2 * p)
    for head in range(size.kv_heads):
        kept = sorted(sorted(range(pairs), key=lambda i: -scores[head, i].item())[:p])
        assert solution.part.frequencies[head].tolist() == adjacent.frequencies[head, kept].tolist()


@few
@given(size=sizes, data=st.data())
def test_partial_rotary_heads_take_the_cheapest_split_into_pairs_and_svd_slots(size: Size, data: st.DataObject):
    pairs, rest = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
    rotated, d = 2 * pairs, 2 * pairs + rest
    width = data.draw(st.integers(1, d - 1))
    problem = qk_problem(replace(size, width=d), pairs=pairs)
    part = problem.part
    X_q, X_k = with_one(problem.X_q, part.b_q), with_one(problem.X_k, part.b_k)
    R_q, R_k = root_of(X_q), root_of(X_k)
    channels = paper_channel_scores(problem, R_q, R_k)
    scores = channels[:, :pairs] + channels[:, pairs:rotated]
    unrotated = only_channels(part, slice(rotated, None))
    W_rest = fused_qk(unrotated)

    prices = {}
    for p in range(pairs + 1):
        if 0 <= width - 2 * p <= rest:
            slots, lost = paper_qk(W_rest, R_q, R_k, group=part.group, rank=width - 2 * p)
            dropped = scores.sort(dim=-1, descending=True).values[:, p:].sum().item()
            prices[p] = (dropped + lost, slots)
    best = min(prices, key=lambda p: prices[p][0])
    loss, slots = prices[best]
    total = scores.sum().item() + (R_q.root @ W_rest @ R_k.root).square().sum().item()

    solution = solution_of("a3", "qk", part, problem.moments, width)
    narrow = solution.part
    assert narrow.width == width
    assert narrow.num_pairs == best
    assert solution.loss == near(loss, total)
    assert solution.total == pytest.approx(total, rel=1e-8)
    for head in range(size.kv_heads):
        kept = sorted(sorted(range(pairs), key=lambda i: -scores[head, i].item())[:best])
        assert narrow.frequencies[head].tolist() == part.frequencies[head, kept].tolist()
        assert narrow.W_k[head, :, : 2 * best].equal(part.W_k[head][:, kept + [i + pairs for i in kept]])
    got = fused_qk(only_channels(narrow, slice(2 * best, None)))
    assert_same(X_q @ got @ X_k.mT, X_q @ slots @ X_k.mT, dense=X_q @ W_rest @ X_k.mT, tolerance=resolved(solution))


def only_channels(part: QK, channels: slice) -> QK:
    """The head channels in `channels`, as a part without rotation."""
    return replace(
        part,
        W_q=part.W_q[..., channels],
        W_k=part.W_k[..., channels],
        b_q=None if part.b_q is None else part.b_q[..., channels],
        b_k=None if part.b_k is None else part.b_k[..., channels],
        frequencies=part.frequencies[:, :0],
    )


def test_a_fully_rotated_head_has_nothing_clipped():
    problem = qk_problem(Size(width=4), pairs=2)
    assert solution_of("a3", "qk", problem.part, problem.moments, 2).clipped == 0.0


# -- QK-norm ---------------------------------------------------------------------------------------------


def test_qk_norm_weights_absorb_the_least_squares_factor_of_the_kept_channels():
    problem = normed_problem(jitter=0.05)
    solution = solution_of("a3", "qk", problem.part, problem.moments, 4)
    part, narrow = problem.part, solution.part
    assert solution.note.startswith("norm corrected")
    for name, norm, new, group in (
        ("q_squares", part.norm_q, narrow.norm_q, 2),
        ("k_squares", part.norm_k, narrow.norm_k, 1),
    ):
        for head, squares in enumerate(problem.moments[name]):
            frequencies = narrow.frequencies[head // group]
            pairs = [part.frequencies[head // group].tolist().index(f) for f in frequencies.tolist()]
            kept = pairs + [i + 3 for i in pairs]
            full = torch.full((6,), 1 / 6, dtype=torch.float64)
            some = torch.zeros_like(full)
            some[kept] = 1 / 4
            factor = (full @ squares @ some) / (some @ squares @ some)
            torch.testing.assert_close(new[head], norm[head, kept] / factor.sqrt(), rtol=1e-10, atol=0)


def test_qk_stays_whole_where_the_norm_would_be_off_by_more_than_the_tolerance():
    problem = normed_problem(jitter=1.0)
    solution = solution_of("a3", "qk", problem.part, problem.moments, 2)
    assert solution.part is problem.part
    assert solution.loss == 0.0
    assert "left whole" in solution.note
    relaxed = solution_of("a3", "qk", problem.part, problem.moments, 2, qk_norm_tolerance=10.0)
    assert relaxed.part.width == 2


def test_a_head_that_is_always_zero_keeps_finite_norm_weights():
    problem = normed_problem(jitter=0.05, dead_key=True)
    solution = solution_of("a3", "qk", problem.part, problem.moments, 4)
    assert solution.part.norm_k is not None
    assert solution.part.norm_k.isfinite().all()
