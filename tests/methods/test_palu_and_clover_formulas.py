"""Palu group by group and CLOVER head by head, against plain SVDs at full size.       [math.md L-6, L-7]"""

from dataclasses import replace

import pytest
import torch
from a3_oracles import assert_same, fused_qk, fused_vo, near, truncated
from a3_problems import Size, few, narrower, normed_problem, ov_problem, qk_problem, sizes, solution_of
from baseline_problems import LinearSize, linear_problem, mean_square, product, solved
from hypothesis import given
from hypothesis import strategies as st

from trisect.methods.baselines import cache_rank, head_groups
from trisect.records.parts import Linear

pytestmark = pytest.mark.usefixtures("one_thread")


# -- Palu --------------------------------------------------------------------------------------------------


def test_heads_go_in_the_largest_equal_groups_of_up_to_four() -> None:
    groups = {1: 1, 2: 1, 3: 1, 4: 1, 5: 5, 6: 2, 7: 7, 8: 2, 9: 3, 10: 5, 12: 3, 32: 8}
    assert {heads: head_groups(heads) for heads in groups} == groups
    for heads in range(1, 65):
        size = max(size for size in (1, 2, 3, 4) if heads % size == 0)
        assert head_groups(heads) * size == heads


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8])
@few
@given(seed=st.integers(0, 2**31 - 1), data=st.data())
def test_each_group_of_heads_is_an_svd_llm_of_its_own(name: str, heads: int, seed: int, data: st.DataObject) -> None:
    d = 3
    problem = linear_problem(LinearSize(seed=seed, name=name, inputs=14, outputs=heads * d, heads=heads, bias=True))
    groups = head_groups(heads)
    columns = heads // groups * d
    rank = data.draw(st.integers(1, columns))
    solution = solved("palu", problem, rank)
    assert solution.A.shape == (14, groups * rank)
    assert solution.B.shape == (groups, rank, columns)
    assert solution.cached
    assert solution.b is problem.part.b
    loss = 0.0
    for group in range(groups):
        here = slice(group * columns, (group + 1) * columns)
        alone = replace(problem, part=Linear(name=name, W=problem.part.W[:, here]))
        expected = solved("svd-llm", alone, rank)
        part = product(solution)[:, here]
        assert (part - product(expected)).norm() <= 1e-9 * part.norm()
        loss += expected.loss
    assert solution.loss == near(loss, solution.total)
    error = mean_square(problem.X, problem.part.W - product(solution))
    assert solution.loss == near(error, solution.total)


def test_a_ratio_is_the_share_of_the_cache_that_goes() -> None:
    for heads, d, ratio in ((8, 64, 0.5), (32, 128, 0.3), (3, 64, 0.2), (5, 80, 0.25)):
        rank = cache_rank(4096, heads * d, heads, ratio)
        kept = rank * head_groups(heads) / (heads * d)
        assert kept == pytest.approx(1 - ratio, abs=0.5 * head_groups(heads) / (heads * d))
    assert cache_rank(64, 64, 4, 0.999) == 1
    assert cache_rank(64, 64, 4, 0.0) == 64
    assert cache_rank(16, 64, 4, 0.0) == 16  # more than it has inputs would be no rank


# -- CLOVER ------------------------------------------------------------------------------------------------


@few
@given(size=sizes, data=st.data())
def test_clover_is_the_svd_of_each_heads_fused_query_and_key_weights(size: Size, data: st.DataObject) -> None:
    rank = narrower(size, data)
    part = qk_problem(size).part
    solution = solution_of("clover", "qk", part, {}, rank)
    W_qk, narrow = fused_qk(part), fused_qk(solution.part)
    loss = 0.0
    for key in range(size.kv_heads):
        heads = slice(key * size.group, (key + 1) * size.group)
        stacked, s = truncated(W_qk[heads].flatten(0, 1), rank)
        loss += s[rank:].square().sum().item()
        assert_same(narrow[heads].flatten(0, 1)[None], stacked[None], dense=W_qk[heads].flatten(0, 1)[None])
    total = W_qk.square().sum().item()
    assert solution.loss == near(loss, total)
    assert solution.loss == near((W_qk - narrow).square().sum().item(), total)


@few
@given(size=sizes, data=st.data())
def test_clover_is_the_svd_of_each_heads_fused_value_and_output_weights(size: Size, data: st.DataObject) -> None:
    rank = narrower(size, data)
    part = ov_problem(size).part
    solution = solution_of("clover", "ov", part, {}, rank)
    W_vo, narrow = fused_vo(part), fused_vo(solution.part)
    for value in range(size.kv_heads):
        heads = slice(value * size.group, (value + 1) * size.group)
        dense, found = (torch.cat(list(W[heads]), dim=1)[None] for W in (W_vo, narrow))
        expected, _ = truncated(dense[0], rank)
        assert_same(found, expected[None], dense=dense)
    assert solution.loss == near((W_vo - narrow).square().sum().item(), W_vo.square().sum().item())


@few
@given(seed=st.integers(0, 2**31 - 1), group=st.integers(1, 2), bias=st.booleans())
def test_with_rope_clover_keeps_the_pairs_whose_weights_are_largest(seed: int, group: int, bias: bool) -> None:
    part = qk_problem(Size(seed=seed, width=8, group=group, bias=bias), pairs=4).part
    narrow = solution_of("clover", "qk", part, {}, 4).part
    for key in range(2):
        scores = []
        for pair in range(4):
            score = 0.0
            for c in (pair, pair + 4):
                queries = part.W_q[key * group : (key + 1) * group, :, c].square().sum()
                keys = part.W_k[key, :, c].square().sum()
                if bias:
                    queries += part.b_q[key * group : (key + 1) * group, c].square().sum()
                    keys += part.b_k[key, c].square()
                score += (queries * keys).item()
            scores.append(score)
        best = sorted(sorted(range(4), key=lambda pair: -scores[pair])[:2])
        assert narrow.frequencies[key].tolist() == part.frequencies[key][best].tolist()
        assert narrow.W_k[key].equal(part.W_k[key][:, [*best, *(pair + 4 for pair in best)]])


def test_clover_leaves_heads_with_a_norm_as_they_are() -> None:
    problem = normed_problem(jitter=0.05)
    solution = solution_of("clover", "qk", problem.part, {}, 4)
    assert solution.part is problem.part
    assert "left whole" in solution.note
