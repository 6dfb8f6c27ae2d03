"""The bilinear basis [math.md B-1, B-2, B-3]: proven against the SVD of the sampled products x y^T (the
Eckart-Young optimum, which no other solution can beat) and against random rivals of the same rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from solve_problems import SEEDS, few, moment, samples
from torch import Tensor

from trisect.solve.lowrank import shared_basis

SPREADS = st.sampled_from([1.0, 1e4, 1e8])


def mean_squared(products: Tensor) -> float:
    """E over all (x, y) pairs."""
    return products.square().mean().item()


@few
@given(SEEDS, st.integers(1, 8), SPREADS, SPREADS, st.data())
def test_every_rank_reaches_the_truncated_svd_of_the_products(
    seed: int, width: int, x_spread: float, y_spread: float, data: st.DataObject
):
    rank = data.draw(st.integers(0, width))
    x = samples(seed, tokens=40, width=width, spread=x_spread)
    y = samples(seed + 1, tokens=30, width=width, spread=y_spread)
    basis = shared_basis(moment(x), moment(y))
    x_map, y_map = basis.maps(rank)
    assert x_map.shape == y_map.shape == (width, rank)

    products = x @ y.mT
    singular = torch.linalg.svdvals(products)[:width]
    optimum = (singular[rank:].square().sum() / products.numel()).item()
    total = mean_squared(products)
    assert mean_squared(products - x @ x_map @ (y @ y_map).mT) == pytest.approx(optimum, rel=1e-8, abs=1e-13 * total)
    assert basis.loss(rank).item() == pytest.approx(optimum, rel=1e-8, abs=1e-13 * total)
    assert basis.total.item() == pytest.approx(total, rel=1e-10)


@few
@given(SEEDS, SPREADS)
def test_no_rival_of_the_same_rank_does_better(seed: int, spread: float):
    d, r = 6, 3
    x = samples(seed, tokens=40, width=d, spread=spread)
    y = samples(seed + 1, tokens=30, width=d, spread=spread)
    basis = shared_basis(moment(x), moment(y))
    x_map, y_map = basis.maps(r)
    best, total = basis.loss(r).item(), basis.total.item()
    generator = torch.Generator().manual_seed(seed)

    def wiggled(map_: Tensor, size: float) -> Tensor:
        step = torch.randn(map_.shape, generator=generator, dtype=map_.dtype)
        return map_ * (1 + size * step)

    for size in (1e-4, 1e-2, 1.0):
        for _ in range(8):
            P = wiggled(x_map, size) @ wiggled(y_map, size).mT
            rival = mean_squared(x @ (torch.eye(d) - P) @ y.mT)
            assert rival >= best - 1e-12 * total
    for subset in torch.combinations(torch.arange(d), r):
        kept = torch.zeros(d, dtype=torch.float64)
        kept[subset] = 1
        assert mean_squared(x @ (torch.eye(d) - torch.diag(kept)) @ y.mT) >= best - 1e-12 * total


@few
@given(SEEDS, SPREADS)
def test_slots_are_uncorrelated_and_carry_their_energy_half_on_each_side(seed: int, spread: float):
    d, r = 6, 4
    C_x = moment(samples(seed, tokens=40, width=d, spread=spread))
    C_y = moment(samples(seed + 1, tokens=30, width=d))
    basis = shared_basis(C_x, C_y)
    x_map, y_map = basis.maps(r)
    shares = torch.diag(basis.values[:r].sqrt())
    largest = basis.values[0].sqrt().item()
    for side in (x_map.mT @ C_x @ x_map, y_map.mT @ C_y @ y_map):
        torch.testing.assert_close(side, shares, rtol=1e-7, atol=1e-9 * largest)


@few
@given(SEEDS, st.integers(1, 8), SPREADS)
def test_loss_never_rises_with_rank_and_full_rank_loses_nothing(seed: int, width: int, spread: float):
    x = samples(seed, tokens=40, width=width, spread=spread)
    y = samples(seed + 1, tokens=30, width=width, spread=spread)
    basis = shared_basis(moment(x), moment(y))
    losses = [basis.loss(rank).item() for rank in range(width + 1)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == 0.0
    assert losses[0] == basis.total.item()
    x_map, y_map = basis.maps(width)
    products = x @ y.mT
    assert (x @ x_map @ (y @ y_map).mT - products).norm() <= 1e-10 * products.norm()


@few
@given(SEEDS, st.integers(1, 5), st.integers(1, 5))
def test_moments_of_few_tokens_need_no_more_slots_than_tokens(seed: int, x_tokens: int, y_tokens: int):
    d = 6
    x = samples(seed, tokens=x_tokens, width=d)
    y = samples(seed + 1, tokens=y_tokens, width=d)
    basis = shared_basis(moment(x), moment(y))
    assert basis.clipped == pytest.approx(1 - x_tokens / d)
    enough = min(x_tokens, y_tokens)
    products = x @ y.mT
    for rank in range(enough, d + 1):
        assert basis.loss(rank).item() <= 1e-13 * basis.total.item()
        x_map, y_map = basis.maps(rank)
        assert x_map.isfinite().all()
        assert y_map.isfinite().all()
        assert (x @ x_map @ (y @ y_map).mT - products).norm() <= 1e-9 * products.norm()


def test_clipped_directions_cost_no_more_than_the_stated_bound():
    # A direction below the floor on one side and loud on the other: the worst case of math.md N-1.
    C_x = torch.diag(torch.tensor([1.0, 1e-14], dtype=torch.float64))
    C_y = torch.diag(torch.tensor([1.0, 1e6], dtype=torch.float64))
    basis = shared_basis(C_x, C_y)
    assert basis.clipped == 0.5
    x_map, y_map = basis.maps(2)
    left = torch.eye(2, dtype=torch.float64) - x_map @ y_map.mT
    uncounted = (left.mT @ C_x @ left @ C_y).trace() - basis.loss(2)
    assert 0 < uncounted <= 1e-13 * C_x.trace() / 2 * C_y.trace()


def test_a_batch_of_heads_is_solved_head_by_head():
    C_x = torch.stack([moment(samples(s, tokens=20, width=5)) for s in range(3)])
    C_y = torch.stack([moment(samples(s + 9, tokens=20, width=5)) for s in range(3)])
    together = shared_basis(C_x, C_y)
    for i in range(3):
        alone = shared_basis(C_x[i], C_y[i])
        torch.testing.assert_close(together.values[i], alone.values)
        (x_a, y_a), (x_b, y_b) = together.maps(2), alone.maps(2)
        torch.testing.assert_close(x_a[i] @ y_a[i].mT, x_b @ y_b.mT)


@pytest.mark.parametrize("silent", ["x", "y", "both"])
def test_a_silent_side_gives_zero_products_and_finite_maps(silent: str):
    loud = moment(samples(0, tokens=20, width=4))
    zero = torch.zeros_like(loud)
    C_x = zero if silent in ("x", "both") else loud
    C_y = zero if silent in ("y", "both") else loud
    basis = shared_basis(C_x, C_y)
    x_map, y_map = basis.maps(2)
    assert x_map.isfinite().all()
    assert y_map.isfinite().all()
    assert basis.total.item() == 0.0
