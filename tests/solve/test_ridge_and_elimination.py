"""Refits and eliminations of a3+: each against brute force, on random problems.

References: numpy-style least squares on the samples themselves, exhaustive search over subsets, finite
perturbations, the dense normal equations.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trisect.solve.lowrank import stacked, value_bases
from trisect.solve.ridge import (
    SKETCH,
    STRENGTHS,
    Regression,
    eliminate_pairs,
    eliminate_rows,
    held_out_ridge,
    inverse_positive,
    ridge,
    steady_choice,
    tried,
    unit_system,
)

seeds = st.integers(0, 10_000)


def samples(seed: int, tokens: int, features: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Correlated features of very different loudness, and targets that depend on them."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(features, features, generator=generator, dtype=torch.float64)
    loud = torch.logspace(-2, 2, features, dtype=torch.float64)
    x = torch.randn(tokens, features, generator=generator, dtype=torch.float64) @ mix * loud
    true = torch.randn(features, outputs, generator=generator, dtype=torch.float64) / loud[:, None]
    noise = torch.randn(tokens, outputs, generator=generator, dtype=torch.float64)
    return x, x @ true + 0.3 * noise


def regression(x: Tensor, y: Tensor) -> Regression:
    n = len(x)
    return Regression(gram=x.T @ x / n, cross=x.T @ y / n, energy=y.square().sum() / n, tokens=n)


@settings(max_examples=20)
@given(seed=seeds, strength=st.sampled_from([1e-4, 1e-2, 1.0]))
def test_ridge_equals_least_squares_on_augmented_samples(seed: int, strength: float) -> None:
    x, y = samples(seed, 80, 6, 3)
    prior = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    energy = x.square().mean(0)
    rows = torch.diag((len(x) * strength * energy).sqrt())
    stacked_x, stacked_y = torch.cat([x, rows]), torch.cat([y, rows @ prior])
    expected = torch.linalg.lstsq(stacked_x, stacked_y).solution
    found = ridge(regression(x, y), prior, strength)
    assert (x @ (found - expected)).norm() < 1e-6 * (x @ expected).norm()


@settings(max_examples=10)
@given(seed=seeds)
def test_the_prior_wins_when_it_is_strong_and_the_data_when_it_is_weak(seed: int) -> None:
    x, y = samples(seed, 200, 5, 2)
    problem, prior = regression(x, y), torch.ones(5, 2, dtype=torch.float64)
    assert (x @ (ridge(problem, prior, 1e9) - prior)).norm() < 1e-6 * (x @ prior).norm()
    free = torch.linalg.lstsq(x, y).solution
    gap = problem.error(ridge(problem, prior, 1e-9)) - problem.error(free)
    assert 0 <= gap + 1e-9
    assert gap < 1e-5 * problem.energy


@settings(max_examples=10)
@given(seed=seeds)
def test_regression_error_equals_the_mean_over_samples(seed: int) -> None:
    x, y = samples(seed, 50, 4, 3)
    W = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = (x @ W - y).square().sum(1).mean()
    torch.testing.assert_close(regression(x, y).error(W), expected)
    halves = regression(x[:20], y[:20]).joined(regression(x[20:], y[20:]))
    torch.testing.assert_close(halves.gram, regression(x, y).gram)
    torch.testing.assert_close(halves.error(W), expected)


def test_held_out_tokens_choose_the_strength_that_does_best_on_them() -> None:
    x, y = samples(3, 60, 12, 2)
    fit, held, prior = regression(x[:30], y[:30]), regression(x[30:], y[30:]), torch.zeros(12, 2).double()
    _, chosen = held_out_ridge(fit, held, prior)
    best = min(held.error(ridge(fit, prior, s)).item() for s in STRENGTHS)
    # Strengths within a thousandth of the best share the choice, so a few thousandths may be given away.
    assert held.error(ridge(fit, prior, chosen)) <= best * (1 + 3e-3)


@settings(max_examples=10)
@given(seed=seeds, noise=st.sampled_from([0.1, 1.0, 10.0]))
def test_many_outputs_choose_by_some_of_their_mixtures_and_lose_little(seed: int, noise: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(60, 12, generator=draw, dtype=torch.float64)
    truth, dust = (torch.randn(n, 2 * SKETCH, generator=draw, dtype=torch.float64) for n in (12, 60))
    y, prior = x @ truth + noise * dust, torch.zeros(12, 2 * SKETCH, dtype=torch.float64)
    fit, held = regression(x[:30], y[:30]), regression(x[30:], y[30:])
    _, chosen = held_out_ridge(fit, held, prior)
    errors = [held.error(ridge(fit, prior, s)).item() for s in STRENGTHS]
    # Of what there is to gain; a few thousandths of the error as above, where there is next to nothing.
    least, most = min(errors), max(errors)
    assert held.error(ridge(fit, prior, chosen)) <= least * (1 + 3e-3) + 0.02 * (most - least)


@settings(max_examples=30)
@given(twins=st.sets(st.integers(0, len(STRENGTHS) - 1), min_size=2, max_size=2), dust=st.floats(-1e-9, 1e-9))
def test_rounding_cannot_move_the_strength_where_two_are_as_good(twins: set[int], dust: float) -> None:
    first, second = (STRENGTHS[number] for number in sorted(twins))
    errors = dict.fromkeys(STRENGTHS, 2.0) | {first: 1.0, second: 1.0}
    between = steady_choice(errors)
    assert first < between < second
    errors[first] += dust
    assert steady_choice(errors) == pytest.approx(between, rel=1e-4)


@given(best=st.floats(-12, 12), steepness=st.floats(1e-4, 10), least=st.floats(0.1, 10))
def test_strengths_that_are_not_tried_would_not_have_changed_the_choice(
    best: float, steepness: float, least: float
) -> None:
    def error(strength: float) -> torch.Tensor:
        return torch.tensor(least + steepness * (math.log(strength) - best) ** 2, dtype=torch.float64)

    asked = {strength: error(strength).item() for strength in STRENGTHS}
    assert steady_choice(tried(error)) == pytest.approx(steady_choice(asked), rel=0.05)


@settings(max_examples=10)
@given(seed=seeds)
def test_a_penalty_is_what_more_samples_would_add_that_agree_with_the_prior(seed: int) -> None:
    x, y = samples(seed, 40, 5, 3)
    more, _ = samples(seed + 1, 30, 5, 3)
    prior = torch.ones(5, 3, dtype=torch.float64)
    problem = replace(regression(x, y), penalty=more.T @ more / len(x))
    stacked = torch.cat([x, 0.7**0.5 * more]), torch.cat([y, 0.7**0.5 * more @ prior])
    expected = torch.linalg.lstsq(*stacked).solution
    torch.testing.assert_close(ridge(problem, prior, 0.7), expected, rtol=1e-6, atol=1e-6)


def test_with_too_few_tokens_the_refit_stays_at_the_prior() -> None:
    """Six tokens, twelve features, noise as large as the signal: the prior is the truth and must survive."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    x = torch.randn(6, 12, generator=generator, dtype=torch.float64)
    y = x @ truth + 3 * torch.randn(6, 4, generator=generator, dtype=torch.float64)
    fresh = torch.randn(2000, 12, generator=generator, dtype=torch.float64)
    other = regression(fresh, fresh @ truth)
    W, chosen = held_out_ridge(regression(x[:4], y[:4]), other, truth)
    assert chosen == pytest.approx(max(STRENGTHS))
    assert other.error(W) < 1e-3 * other.energy


@settings(max_examples=15)
@given(seed=seeds)
def test_dropping_one_row_at_a_time_finds_the_cheapest_row(seed: int) -> None:
    x, _ = samples(seed, 100, 6, 3)
    W = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gram = x.T @ x / len(x)
    kept = eliminate_rows(gram, W, 5, ridge=0.0)
    losses = {}
    for gone in range(6):
        rest = [i for i in range(6) if i != gone]
        refit = torch.linalg.lstsq(x[:, rest], x @ W).solution
        losses[gone] = (x[:, rest] @ refit - x @ W).square().sum().item()
    gone = ({*range(6)} - set(kept.tolist())).pop()
    assert losses[gone] <= min(losses.values()) * (1 + 1e-6)


@settings(max_examples=10)
@given(seed=seeds)
def test_elimination_beats_scores_that_ignore_correlation(seed: int) -> None:
    """A duplicated neuron is free to drop: elimination sees it, energy times weight does not."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 5, generator=generator, dtype=torch.float64)
    x = torch.cat([x, x[:, -1:]], dim=1)
    W = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    kept = eliminate_rows(x.T @ x / len(x), W, 5, ridge=1e-9)
    assert not {4, 5} <= set(kept.tolist())


def pair_gram(seed: int, k: int = 1, g: int = 2, P: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(k, g, 60, 2 * P, generator=generator, dtype=torch.float64)
    z = z @ torch.randn(2 * P, 2 * P, generator=generator, dtype=torch.float64)
    return z.mT @ z / 60, z


@settings(max_examples=15)
@given(seed=seeds, quadrature=st.booleans())
def test_the_first_pair_to_go_is_the_cheapest_of_all_after_compensation(seed: int, quadrature: bool) -> None:
    G, z = pair_gram(seed)
    P = 4
    pairs = eliminate_pairs(G, 3, ridge=0.0, quadrature=quadrature)
    losses = {}
    for kept in itertools.combinations(range(P), 3):
        columns = [*kept, *(c + P for c in kept)] if quadrature else list(kept)
        losses[kept] = sum(best_fit(z[0, head], columns, P) for head in range(2))
    assert tuple(pairs.kept[0].tolist()) == min(losses, key=losses.__getitem__)
    torch.testing.assert_close(pairs.loss[0], torch.tensor(min(losses.values())).double(), rtol=1e-6, atol=1e-9)


def best_fit(z: Tensor, columns: list[int], P: int) -> float:
    whole = z[:, :P].sum(1, keepdim=True)
    solution = torch.linalg.lstsq(z[:, columns], whole).solution
    return ((z[:, columns] @ solution - whole).square().sum() / len(z)).item()


@settings(max_examples=10)
@given(seed=seeds)
def test_compensation_coefficients_are_the_least_squares_ones(seed: int) -> None:
    G, z = pair_gram(seed, k=2)
    pairs = eliminate_pairs(G, 2, ridge=0.0)
    for head in range(2):
        kept = pairs.kept[head].tolist()
        for query in range(2):
            columns = [*kept, *(c + 4 for c in kept)]
            whole = z[head, query, :, :4].sum(1, keepdim=True)
            expected = torch.linalg.lstsq(z[head, query][:, columns], whole).solution.squeeze(1)
            found = torch.cat([pairs.real[head, query], pairs.quadrature[head, query]])
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_head_that_tells_no_keys_apart_keeps_its_pairs_as_they_are() -> None:
    """Its Gram is zero, as where softmax gives one key all the weight."""
    G, _ = pair_gram(0, k=2)
    G[1] = 0
    pairs, alone = eliminate_pairs(G, 2, ridge=1e-4), eliminate_pairs(G[:1], 2, ridge=1e-4)
    assert pairs.real[1].eq(1).all()
    assert pairs.quadrature[1].eq(0).all()
    assert pairs.kept[0].equal(alone.kept[0])


def test_pairs_as_they_are_miss_what_the_samples_say() -> None:
    G, z = pair_gram(7, k=2)
    pairs = eliminate_pairs(G, 2, ridge=1.0).untouched().judged(G)
    for head in range(2):
        gone = [pair for pair in range(4) if pair not in pairs.kept[head].tolist()]
        expected = z[head][..., gone].sum(dim=-1).square().mean(dim=-1).sum()
        torch.testing.assert_close(pairs.loss[head], expected)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_alternating_value_bases_never_lose_to_the_per_head_start(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(kv_heads)
    h, d, D, r = 4, 5, 12, 3
    a = torch.randn(300, h * d, generator=generator, dtype=torch.float64)
    a = a @ torch.randn(h * d, h * d, generator=generator, dtype=torch.float64)
    W = torch.randn(h, d, D, generator=generator, dtype=torch.float64)
    gram = a.T @ a / len(a)
    errors = [joint_error(a, W, value_bases(gram, W, kv_heads=kv_heads, rank=r, rounds=n)) for n in (0, 2, 8)]
    assert errors[1] <= errors[0] * (1 + 1e-9)
    assert errors[2] <= errors[1] * (1 + 1e-9)
    assert errors[2] < errors[0]


def joint_error(a: Tensor, W: Tensor, T: Tensor) -> float:
    """The best any output projection can do behind the bases, on the samples."""
    narrow = a @ stacked(T, W.shape[0])
    whole = a @ W.flatten(0, 1)
    return (narrow @ torch.linalg.lstsq(narrow, whole).solution - whole).square().sum().item()


def test_no_small_change_of_the_value_bases_does_better_after_enough_rounds() -> None:
    generator = torch.Generator().manual_seed(1)
    h, d, D, r = 2, 4, 6, 2
    a = torch.randn(200, h * d, generator=generator, dtype=torch.float64)
    a = a @ torch.randn(h * d, h * d, generator=generator, dtype=torch.float64)
    W = torch.randn(h, d, D, generator=generator, dtype=torch.float64)
    T = value_bases(a.T @ a / len(a), W, kv_heads=1, rank=r, rounds=200)
    best = joint_error(a, W, T)
    for _ in range(20):
        nearby = T + 1e-3 * torch.randn(T.shape, generator=generator, dtype=torch.float64)
        assert joint_error(a, W, nearby) >= best * (1 - 1e-6)


@settings(max_examples=10)
@given(seed=seeds)
def test_overwriting_the_gram_changes_no_answer(seed: int) -> None:
    x, y = samples(seed, 80, 8, 3)
    problem, prior = regression(x, y), torch.ones(8, 3, dtype=torch.float64)
    spent = regression(x, y)
    assert ridge(problem, prior, 0.1).equal(ridge(spent, prior, 0.1, overwrite=True))
    kept = eliminate_rows(problem.gram, y.new_ones(8, 3), 5, ridge=1e-3)
    assert kept.equal(eliminate_rows(problem.gram.clone(), y.new_ones(8, 3), 5, ridge=1e-3, overwrite=True))
    assert problem.gram.equal(regression(x, y).gram), "without the word the Gram is left alone"


@settings(max_examples=10)
@given(seed=seeds)
def test_a_gram_in_float32_is_solved_in_float64(seed: int) -> None:
    x, y = samples(seed, 200, 6, 3)
    halves = regression(x[:120], y[:120]), regression(x[120:], y[120:])
    short = tuple(replace(problem, gram=problem.gram.float()) for problem in halves)
    kept = torch.tensor([0, 2, 3])
    for exact, rounded in (
        (halves[0].joined(halves[1]), short[0].joined(short[1])),
        (halves[0].chosen(kept), short[0].chosen(kept)),
        (halves[0].whole(), short[0].whole()),
        (halves[0].mapped(x.new_ones(6, 2)), short[0].mapped(x.new_ones(6, 2))),
    ):
        assert rounded.gram.dtype == torch.float64
        size = exact.gram.diagonal().sqrt()
        assert ((rounded.gram - exact.gram).abs() <= 2e-6 * size.max() ** 2).all()
    torch.testing.assert_close(short[0].energies(short[1]), halves[0].joined(halves[1]).gram.diagonal())


@settings(max_examples=10)
@given(seed=seeds)
def test_the_inverse_of_a_positive_system_is_its_inverse(seed: int) -> None:
    x, _ = samples(seed, 60, 7, 1)
    system, _ = unit_system(x.T @ x, 1e-3)
    expected = torch.linalg.inv(system)
    torch.testing.assert_close(inverse_positive(system.clone()), expected, rtol=1e-8, atol=1e-8)
    assert inverse_positive(-system).isfinite().all(), "no root: the general solver steps in"
