"""Slots fitted to the scores they stand in for: against least squares on the samples themselves."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from solve_problems import SEEDS, few
from torch import Tensor

from trisect.solve.select import SlotScores, compensate

RIDGES = (1e-4, 1e-2, 1.0)
H, SLOTS = 3, 4


def samples(seed: int, count: int) -> tuple[Tensor, Tensor]:
    """Features [s | t] (h, n, 2p) of slots, and a score (h, n) that is roughly the sum of all s."""
    generator = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(H, 2 * SLOTS, 2 * SLOTS, generator=generator, dtype=torch.float64)).Q
    # Loud and quiet directions a hundredfold apart: normal equations still hold ten digits.
    mix = turn * torch.logspace(-1, 1, 2 * SLOTS, dtype=torch.float64)
    z = torch.randn(H, count, 2 * SLOTS, generator=generator, dtype=torch.float64) @ mix
    noise = torch.randn(H, count, generator=generator, dtype=torch.float64)
    gone = torch.randn(H, 2 * SLOTS, 1, generator=generator, dtype=torch.float64)
    return z, z[..., :SLOTS].sum(dim=-1) + 0.4 * (z @ gone).squeeze(-1) + noise


def scores(z: Tensor, y: Tensor) -> SlotScores:
    n = z.shape[1]
    cross = (z * y.unsqueeze(-1)).sum(dim=1) / n
    return SlotScores(gram=z.mT @ z / n, cross=cross, energy=y.square().mean(dim=1))


@few
@given(seed=SEEDS)
def test_without_a_ridge_the_coefficients_are_the_least_squares_ones(seed: int) -> None:
    z, y = samples(seed, 60)
    expected = torch.linalg.lstsq(z, y.unsqueeze(-1)).solution.squeeze(-1)
    found = scores(z, y).solved(1e-13)
    assert ((z @ (found - expected).unsqueeze(-1)).norm() <= 1e-6 * y.norm()).all()


@few
@given(seed=SEEDS)
def test_with_a_ridge_they_are_those_of_samples_that_ask_for_slots_as_they_are(seed: int) -> None:
    z, y = samples(seed, 60)
    problem, ridge = scores(z, y), 0.3
    loudness = z.square().mean(dim=(1, 2))
    extra = (60 * ridge * loudness).sqrt()[:, None, None] * torch.eye(2 * SLOTS, dtype=torch.float64)
    start = torch.tensor([1.0] * SLOTS + [0.0] * SLOTS, dtype=torch.float64)
    more_z, more_y = torch.cat([z, extra], dim=1), torch.cat([y, extra @ start], dim=1)
    expected = torch.linalg.lstsq(more_z, more_y.unsqueeze(-1)).solution.squeeze(-1)
    torch.testing.assert_close(problem.solved(ridge), expected, rtol=1e-6, atol=1e-8)


@few
@given(seed=SEEDS)
def test_a_huge_ridge_leaves_every_slot_as_it_is(seed: int) -> None:
    problem = scores(*samples(seed, 20))
    torch.testing.assert_close(problem.solved(1e12), problem.untouched(), rtol=0, atol=1e-8)
    assert problem.untouched().tolist() == [[1.0] * SLOTS + [0.0] * SLOTS] * H


@few
@given(seed=SEEDS)
def test_the_error_is_the_mean_square_over_samples(seed: int) -> None:
    z, y = samples(seed, 30)
    c = torch.randn(H, 2 * SLOTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = (y - (z @ c.unsqueeze(-1)).squeeze(-1)).square().mean(dim=1)
    torch.testing.assert_close(scores(z, y).error(c), expected)
    both = scores(z[:, :10], y[:, :10]).joined(scores(z[:, 10:], y[:, 10:]), 1 / 3)
    torch.testing.assert_close(both.error(c), expected)


@few
@given(seed=SEEDS, fitted=st.integers(2, 40), other=st.booleans())
def test_compensation_never_errs_more_on_held_out_queries_than_no_compensation(
    seed: int, fitted: int, other: bool
) -> None:
    """Also where the fit has too few samples, or samples of something else."""
    fit, held = scores(*samples(seed, fitted)), scores(*samples(seed + other, 25))
    share = fitted / (fitted + 25)
    c, error = compensate(fit, held, share=share, ridges=RIDGES)
    tried = [held.error(fit.solved(ridge)) for ridge in RIDGES] + [held.error(fit.untouched())]
    assert error.sum() == min(errors.sum() for errors in tried)
    both = fit.joined(held, share)
    answers = [*(both.solved(ridge) for ridge in RIDGES), both.untouched()]
    assert any(error.equal(errors) and c.equal(a) for errors, a in zip(tried, answers, strict=True))


def test_without_ridges_to_try_the_slots_stay_as_they_are() -> None:
    fit, held = scores(*samples(1, 40)), scores(*samples(2, 40))
    c, error = compensate(fit, held, share=0.5, ridges=())
    assert c.equal(fit.untouched())
    assert error.equal(held.error(fit.untouched()))


def test_slots_that_nobody_hears_are_left_alone() -> None:
    z, y = samples(4, 30)
    silent = scores(torch.zeros_like(z), y)
    assert silent.solved(1e-4).equal(silent.untouched())
