"""Rank rules against exhaustive searches and the papers' formulas.             [math.md L-4, L-10 to L-12]"""

import itertools
import math

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from trisect.errors import TrisectError
from trisect.pipeline.rank_search import (
    MOST_REMOVED,
    Curve,
    Key,
    Size,
    aligned,
    fisher_ratios,
    loss_ratios,
    ranks_at,
    sensitivity_ranks,
    spread,
    truncation_loss,
)

few = settings(max_examples=60)
ratios = st.floats(0.01, 0.9)
positive = st.floats(1e-6, 1e6)


def parameter_rule(inputs: int, outputs: int, heads: int, ratio: float) -> int:
    """Written apart from the one in methods: plan may not import those."""
    return max(1, int((1 - ratio) * inputs * outputs / (inputs + outputs) + 1e-9))


def cost(size: Size, rank: int) -> int:
    inputs, outputs, _ = size
    return inputs * outputs if rank >= min(inputs, outputs) else rank * (inputs + outputs)


# -- one ratio ---------------------------------------------------------------------------------------------

SIZES = {(0, "q"): (64, 64, 4), (0, "down"): (256, 64, 1), (1, "k"): (64, 16, 1)}


@few
@given(ratio=ratios)
def test_without_alignment_the_rule_is_followed_exactly(ratio: float) -> None:
    found = ranks_at(SIZES, parameter_rule, dict.fromkeys(SIZES, ratio), None)
    assert found == {key: parameter_rule(*size, ratio) for key, size in SIZES.items()}


@few
@given(rank=st.integers(1, 300), more=st.integers(0, 100), align=st.sampled_from([8, 16, 32]))
def test_aligned_ranks_are_the_nearest_step_there_is(rank: int, more: int, align: int) -> None:
    most = rank + more
    steps = [step for step in range(align, most + 1, align)]
    expected = min(steps, key=lambda step: (abs(step - rank), step)) if steps else rank
    assert aligned(rank, most=most, align=align) == expected


def test_ties_go_down_and_one_step_is_the_least() -> None:
    assert aligned(12, most=64, align=8) == 8
    assert aligned(13, most=64, align=8) == 16
    assert aligned(1, most=64, align=16) == 16
    assert aligned(30, most=31, align=16) == 16  # 32 would be above what no cut at all allows
    assert aligned(3, most=5, align=16) == 3


def test_each_map_can_have_a_ratio_of_its_own() -> None:
    own = {(0, "q"): 0.5, (0, "down"): 0.0, (1, "k"): 0.9}
    found = ranks_at(SIZES, parameter_rule, own, None)
    assert found == {key: parameter_rule(*SIZES[key], own[key]) for key in SIZES}


# -- shares under a cap ------------------------------------------------------------------------------------


@few
@given(weights=st.lists(positive, min_size=1, max_size=8), mean=st.floats(0.01, 1.0))
def test_spread_is_proportional_under_its_cap_and_has_its_mean(weights: list[float], mean: float) -> None:
    shares = list(spread(dict(enumerate(weights)), mean=mean, most=1.0).values())
    assert sum(shares) == pytest.approx(mean * len(weights))
    assert all(0 <= share <= 1 + 1e-12 for share in shares)
    # The reference: scale all weights by one number, cap, and bisect for the mean.
    low, high = 0.0, 1e13
    for _ in range(300):
        middle = (low + high) / 2
        total = sum(min(1.0, middle * weight) for weight in weights)
        low, high = (middle, high) if total < mean * len(weights) else (low, middle)
    assert shares == pytest.approx([min(1.0, high * weight) for weight in weights], abs=1e-6)


def test_nothing_to_tell_apart_means_alike() -> None:
    assert spread({"a": 0.0, "b": 0.0}, mean=0.3, most=1.0) == {"a": 0.3, "b": 0.3}
    shares = spread({"a": 1.0, "b": 0.0, "c": 0.0}, mean=0.5, most=1.0)
    assert shares == pytest.approx({"a": 1.0, "b": 0.25, "c": 0.25})


# -- SVD-LLM V2 --------------------------------------------------------------------------------------------


@few
@given(
    losses=st.dictionaries(
        st.tuples(st.integers(0, 5), st.sampled_from(["q", "down"])), st.floats(10, 1e8), min_size=1
    ),
    ratio=st.floats(0.05, 0.4),
)
def test_ratios_are_the_papers_where_nothing_is_clipped(losses: dict[Key, float], ratio: float) -> None:
    found = loss_ratios(losses, ratio)
    assert list(found) == list(losses)
    for kind in {name for _, name in losses}:
        L_G = {key: 1 / math.log(loss) for key, loss in losses.items() if key[1] == kind}
        paper = {key: len(L_G) * ratio * value / sum(L_G.values()) for key, value in L_G.items()}
        if max(paper.values()) <= MOST_REMOVED:
            assert {key: found[key] for key in L_G} == pytest.approx(paper)


@few
@given(
    losses=st.dictionaries(
        st.tuples(st.integers(0, 8), st.sampled_from(["q", "v", "up"])), st.floats(0, 1e9), min_size=1
    ),
    ratio=st.floats(0.01, 0.99),
)
def test_every_type_removes_the_ratio_on_average_whatever_the_losses(losses: dict[Key, float], ratio: float) -> None:
    found = loss_ratios(losses, ratio)
    for kind in {name for _, name in losses}:
        mine = {key: value for key, value in found.items() if key[1] == kind}
        assert sum(mine.values()) / len(mine) == pytest.approx(ratio)
        assert all(0 < value <= max(MOST_REMOVED, ratio) + 1e-12 for value in mine.values())
        for a, b in itertools.combinations(mine, 2):
            if losses[a] < losses[b]:
                assert mine[a] >= mine[b] - 1e-12


def test_losses_are_frobenius_norms_over_all_tokens() -> None:
    assert truncation_loss(0.25, tokens=400) == pytest.approx(10.0)


# -- Palu --------------------------------------------------------------------------------------------------


@few
@given(
    fisher=st.dictionaries(st.tuples(st.integers(0, 8), st.sampled_from(["k", "v"])), st.floats(0, 1e3), min_size=1),
    ratio=ratios,
)
@example(fisher={(0, "k"): 1e-323}, ratio=0.7921)  # a denormal number has no digits to spare
@example(fisher={(0, "k"): 999.0, (1, "k"): 5e-324, (1, "v"): 1e-323}, ratio=0.4)
@example(fisher={(0, "k"): 250.0, (0, "v"): 999.0, (1, "k"): 1e-8}, ratio=0.9)
def test_palu_keeps_ranks_in_proportion_to_fisher_information(fisher: dict[Key, float], ratio: float) -> None:
    full = 1000.0
    found = fisher_ratios(fisher, ratio)
    ranks = {key: full * (1 - value) for key, value in found.items()}
    total = (1 - ratio) * full * len(fisher)
    assert sum(ranks.values()) == pytest.approx(total)
    assert all(-1e-6 <= rank <= full + 1e-6 for rank in ranks.values())
    if (everything := sum(fisher.values())) > 0:
        # The quotient first: of two denormal numbers it is as good as any, total * value is not.
        paper = {key: total * (value / everything) for key, value in fisher.items()}
        if max(paper.values()) <= full:
            assert ranks == pytest.approx(paper, abs=1e-6)
        open_ranks = [key for key in fisher if ranks[key] < full * (1 - 1e-9) and fisher[key] > 1e-9]
        for a, b in itertools.combinations(open_ranks, 2):
            # A ratio of nearly 1 holds its rank to about 1e-13 and no better.
            dust = 1e-12 * (fisher[a] + fisher[b])
            assert ranks[a] * fisher[b] == pytest.approx(ranks[b] * fisher[a], rel=1e-6, abs=dust)


# -- ASVD --------------------------------------------------------------------------------------------------

curve = st.dictionaries(st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9]), st.floats(5, 500), min_size=1)
size = st.tuples(st.integers(4, 60), st.integers(4, 60), st.just(1))


@few
@given(maps=st.lists(st.tuples(curve, size), min_size=1, max_size=5), ratio=st.floats(0.01, 0.95))
def test_strs_forbids_as_many_sensitive_cuts_as_the_budget_allows(maps: list[tuple[Curve, Size]], ratio: float) -> None:
    curves: dict[Key, Curve] = {(layer, "up"): entry for layer, (entry, _) in enumerate(maps)}
    sizes: dict[Key, Size] = {(layer, "up"): entry for layer, (_, entry) in enumerate(maps)}
    values = [perplexity for entry in curves.values() for perplexity in entry.values()]
    assume(len(set(values)) == len(values))
    budget = (1 - ratio) * sum(inputs * outputs for inputs, outputs, _ in sizes.values())

    def below(threshold: float) -> dict[Key, int]:
        """Exhaustively: the deepest cut of each map whose perplexity is not above the threshold."""
        found = {}
        for key, entry in curves.items():
            allowed = [share for share, perplexity in entry.items() if perplexity <= threshold]
            inputs, outputs, _ = sizes[key]
            whole = min(inputs, outputs)
            found[key] = parameter_rule(*sizes[key], 1 - min(allowed)) if allowed else whole
        return found

    thresholds = [0.0, *sorted(values)]
    fitting = [
        ranks
        for ranks in map(below, thresholds)
        if sum(cost(sizes[key], rank) for key, rank in ranks.items()) <= budget
    ]
    if not fitting:
        with pytest.raises(TrisectError, match="No measured sensitivity reaches"):
            sensitivity_ranks(curves, sizes, parameter_rule, ratio)
        return
    assert sensitivity_ranks(curves, sizes, parameter_rule, ratio) == fitting[0]


@few
@given(maps=st.lists(st.tuples(curve, size), min_size=1, max_size=5), ratio=st.floats(0.01, 0.85))
def test_strs_never_goes_over_the_budget_even_with_ties_and_broken_models(
    maps: list[tuple[Curve, Size]], ratio: float
) -> None:
    curves: dict[Key, Curve] = {
        (layer, "up"): {0.1: math.nan, 0.2: 40.0, **dict.fromkeys(entry, 40.0)} for layer, (entry, _) in enumerate(maps)
    }
    sizes: dict[Key, Size] = {(layer, "up"): entry for layer, (_, entry) in enumerate(maps)}
    budget = (1 - ratio) * sum(inputs * outputs for inputs, outputs, _ in sizes.values())
    try:
        ranks = sensitivity_ranks(curves, sizes, parameter_rule, ratio)
    except TrisectError:
        least = {key: parameter_rule(*entry, 0.9) for key, entry in sizes.items()}
        assert sum(cost(sizes[key], rank) for key, rank in least.items()) > budget
        return
    assert sum(cost(sizes[key], rank) for key, rank in ranks.items()) <= budget


def test_a_map_too_sensitive_to_cut_stays_whole() -> None:
    sizes: dict[Key, Size] = {(0, "q"): (40, 40, 1), (1, "q"): (40, 40, 1)}
    curves = {(0, "q"): {0.5: 100.0, 0.25: 200.0}, (1, "q"): {0.5: 6.0, 0.25: 7.0}}
    found = sensitivity_ranks(curves, sizes, parameter_rule, 0.25)
    assert found == {(0, "q"): 40, (1, "q"): 10}
