"""Folding rotation pairs: maps, energies and rates, against explicit complex arithmetic on samples.

References: products of complex numbers written out, singular values of the whole product, every choice of
pairs, and the bound of math.md P-4 on what a fold misses at a distance.
"""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from solve_problems import SEEDS, few
from torch import Tensor

from trisect.solve.select import band_slots, bands, bilinear_energies, complex_moment, real_map

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
M = st.integers(1, 5)


def rows(seed: int, *shape: int) -> Tensor:
    """Correlated complex rows (..., tokens, m) of very different loudness."""
    generator = torch.Generator().manual_seed(seed)
    m = shape[-1]
    z, mix = (torch.randn(*size, generator=generator, dtype=torch.complex128) for size in (shape, (*shape[:-2], m, m)))
    return z @ mix * torch.logspace(-1, 1, m, dtype=torch.float64)[torch.randperm(m, generator=generator)]


def moment(z: Tensor) -> Tensor:
    return z.mH @ z / z.shape[-2]


def some_rates(seed: int, m: int, spread: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.3 + spread * torch.rand(m, generator=generator, dtype=torch.float64)


def split(z: Tensor) -> Tensor:
    return torch.cat([z.real, z.imag], dim=-1)


@few
@given(seed=SEEDS, m=M)
def test_a_complex_moment_is_the_mean_of_conjugate_products(seed: int, m: int) -> None:
    z = rows(seed, 2, 9, m)
    x = split(z)
    found = complex_moment(x.mT @ x / 9)
    expected = torch.stack([sum(torch.outer(row.conj(), row) for row in head) / 9 for head in z])
    torch.testing.assert_close(found, expected, **CLOSE)


@few
@given(seed=SEEDS, m=M, n=M)
def test_a_real_map_does_to_halves_what_the_complex_one_does_to_rows(seed: int, m: int, n: int) -> None:
    z, maps = rows(seed, 3, 7, m), rows(seed + 1, 3, m, n)
    torch.testing.assert_close(split(z) @ real_map(maps), split(z @ maps), **CLOSE)


@few
@given(rates=st.lists(st.floats(0, 1), min_size=1, max_size=12), spread=st.one_of(st.just(0.0), st.floats(1e-6, 1.0)))
def test_bands_hold_every_pair_once_slowest_first_and_as_wide_as_allowed(rates: list[float], spread: float) -> None:
    theta = torch.tensor(rates, dtype=torch.float64)
    found = bands(theta, spread=spread)
    order = [pair for band in found for pair in band]
    assert sorted(order) == list(range(len(rates)))
    assert [rates[pair] for pair in order] == sorted(rates)
    for band in found:
        assert len(band) == 1 or rates[band[-1]] - rates[band[0]] < spread
    for band, after in itertools.pairwise(found):
        assert rates[after[0]] - rates[band[0]] >= spread


@few
@given(seed=SEEDS, m=M, n=M)
def test_energies_are_the_squared_singular_values_of_all_scores(seed: int, m: int, n: int) -> None:
    """n < m rows: keys that do not reach every direction."""
    k, q = rows(seed, 2, n, m), rows(seed + 1, 2, 11, m)
    found = bilinear_energies(moment(k), moment(q))
    values = torch.linalg.svdvals(k @ q.mH / (n * 11) ** 0.5).square()
    expected = torch.zeros(2, m, dtype=torch.float64)
    expected[:, : values.shape[-1]] = values[:, :m]
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9 * values.max().item())


@few
@given(seed=SEEDS, m=M, spread=st.sampled_from([0.0, 1e-3, 0.5]))
def test_as_many_slots_as_pairs_score_the_same_at_every_distance(seed: int, m: int, spread: float) -> None:
    k, q, rates = rows(seed, 2, 9, m), rows(seed + 1, 2, 9, m), some_rates(seed, m, spread)
    k_map, q_map, turning = band_slots(moment(k), moment(q), rates, m)
    for distance in (0, 1, 17, 10_000):
        expected = (q.conj() * k * torch.exp(1j * rates * distance)).sum(dim=-1)
        slots = (q @ q_map).conj() * (k @ k_map) * torch.exp(1j * turning * distance).unsqueeze(-2)
        torch.testing.assert_close(slots.sum(dim=-1), expected, rtol=1e-8, atol=1e-8)


@few
@given(seed=SEEDS, m=st.integers(2, 5), data=st.data())
def test_slots_turn_at_real_rates_inside_the_band_and_do_not_overlap(seed: int, m: int, data: st.DataObject) -> None:
    n, rates = data.draw(st.integers(1, m)), some_rates(seed, m, 0.2)
    k_map, q_map, turning = band_slots(moment(rows(seed, 3, 9, m)), moment(rows(seed + 1, 3, 9, m)), rates, n)
    assert turning.dtype == torch.float64
    assert (turning >= rates.min() - 1e-12).all()
    assert (turning <= rates.max() + 1e-12).all()
    assert (turning.diff(dim=-1) >= 0).all()
    ones = torch.eye(n, dtype=torch.complex128).expand(3, -1, -1)
    torch.testing.assert_close(q_map.mH @ k_map, ones, **CLOSE)


@few
@given(seed=SEEDS, m=st.integers(2, 5), data=st.data())
def test_at_one_rate_no_choice_of_pairs_keeps_more_of_both_sides(seed: int, m: int, data: st.DataObject) -> None:
    """Energy of keys and queries, each pair's two sides made equally loud."""
    n = data.draw(st.integers(1, m))
    C_k, C_q = moment(rows(seed, 1, 9, m)), moment(rows(seed + 1, 1, 9, m))
    k_map, _, turning = band_slots(C_k, C_q, torch.full((m,), 0.3, dtype=torch.float64), n)
    torch.testing.assert_close(turning, torch.full((1, n), 0.3, dtype=torch.float64), **CLOSE)
    loud_k, loud_q = (C.diagonal(dim1=-2, dim2=-1).real for C in (C_k, C_q))
    b = (loud_q / loud_k).pow(0.25).unsqueeze(-1)
    U = k_map / b
    U = U / U.norm(dim=-2, keepdim=True)
    torch.testing.assert_close(U.mH @ U, torch.eye(n, dtype=U.dtype).unsqueeze(0), rtol=1e-7, atol=1e-7)
    both = b * C_k * b.mT + C_q / b / b.mT
    kept = torch.einsum("kan,kab,kbn->", U.conj(), both, U).real
    loudness = 2 * (loud_k * loud_q).sqrt()[0]
    for pairs in itertools.combinations(range(m), n):
        assert kept >= loudness[list(pairs)].sum() * (1 - 1e-6)


@few
@given(seed=SEEDS, m=st.integers(2, 5), data=st.data())
def test_where_queries_spread_like_keys_nothing_of_that_rank_scores_better(
    seed: int, m: int, data: st.DataObject
) -> None:
    n = data.draw(st.integers(1, m - 1))
    k = rows(seed, 1, 9, m)
    C_k, C_q = moment(k), 5.0 * moment(k)
    k_map, q_map, _ = band_slots(C_k, C_q, torch.full((m,), 0.3, dtype=torch.float64), n)
    rest = torch.eye(m, dtype=torch.complex128) - k_map @ q_map.mH
    missed = torch.einsum("kab,kbc,kdc,kda->", C_k, rest, rest.conj(), C_q).real
    torch.testing.assert_close(missed, bilinear_energies(C_k, C_q)[:, n:].sum(), rtol=1e-6, atol=1e-9)


@few
@given(seed=SEEDS, m=st.integers(2, 5), data=st.data())
def test_what_a_fold_misses_at_a_distance_is_bounded_by_the_bands_spread(
    seed: int, m: int, data: st.DataObject
) -> None:
    """math.md P-4, on the samples themselves: x what the slots hold of a row, w what they do not."""
    n, spread = data.draw(st.integers(1, m)), data.draw(st.sampled_from([1e-3, 1e-2]))
    k, q, rates = rows(seed, 1, 6, m), rows(seed + 1, 1, 6, m), some_rates(seed, m, spread)
    k_map, q_map, turning = band_slots(moment(k), moment(q), rates, n)
    loud_k, loud_q = k_map.norm(dim=-1), q_map.norm(dim=-1)  # k_map = b U, q_map = U / b
    # A pair that no slot holds may have any balance: the bound is then about what is missed of it alone.
    balance = torch.where(loud_q > 0, loud_k / loud_q, torch.ones_like(loud_q)).sqrt().unsqueeze(-2)
    x_k, x_q = (k @ k_map).norm(dim=-1), (q @ q_map).norm(dim=-1)
    w_k = (k * balance - k @ k_map @ (q_map * balance.mT).mH).norm(dim=-1)
    w_q = (q / balance - q @ q_map @ (k_map / balance.mT).mH).norm(dim=-1)
    for distance in (0, 3, 40, 300):
        true = (q.conj() * k * torch.exp(1j * rates * distance)).sum(dim=-1)
        slots = (q @ q_map).conj() * (k @ k_map) * torch.exp(1j * turning * distance).unsqueeze(-2)
        part = spread * distance / 2
        bound = w_k * w_q + part * (x_k * w_q + w_k * x_q) + part**2 / 2 * x_k * x_q
        assert ((slots.sum(dim=-1) - true).abs() <= bound * (1 + 1e-6) + 1e-9).all()


@pytest.mark.parametrize("silent", ["key", "query", "both"])
def test_a_silent_pair_leaves_the_maps_finite_and_the_others_whole(silent: str) -> None:
    k, q, rates = rows(3, 1, 9, 3), rows(4, 1, 9, 3), some_rates(5, 3, 0.01)
    if silent in ("key", "both"):
        k[..., 1] = 0
    if silent in ("query", "both"):
        q[..., 1] = 0
    k_map, q_map, turning = band_slots(moment(k), moment(q), rates, 3)
    assert k_map.isfinite().all()
    assert q_map.isfinite().all()
    slots = (q @ q_map).conj() * (k @ k_map) * torch.exp(100j * turning).unsqueeze(-2)
    expected = (q.conj() * k * torch.exp(100j * rates)).sum(dim=-1)
    torch.testing.assert_close(slots.sum(dim=-1), expected, rtol=1e-6, atol=1e-6)


@few
@given(seed=SEEDS, loudness=st.sampled_from([1e-30, 1e-12, 1e12]))
def test_the_maps_are_no_larger_for_keys_that_hardly_vary(seed: int, loudness: float) -> None:
    """A head that looks at one token only: its keys vary little, and may be as large as any."""
    C_k, C_q, rates = moment(rows(seed, 1, 9, 3)), moment(rows(seed + 1, 1, 9, 3)), some_rates(5, 3, 0.01)
    for found, usual in zip(band_slots(loudness * C_k, C_q, rates, 2), band_slots(C_k, C_q, rates, 2), strict=True):
        torch.testing.assert_close(found.abs(), usual.abs(), rtol=1e-6, atol=1e-9)


def test_keys_that_do_not_vary_at_all_leave_the_choice_to_the_queries() -> None:
    C_q, rates = moment(rows(1, 2, 9, 3)), some_rates(5, 3, 0.01)
    for C_k in (torch.zeros_like(C_q), torch.zeros_like(C_q) - 1e-18):
        k_map, q_map, turning = band_slots(C_k, C_q, rates, 2)
        assert max(k_map.abs().max(), q_map.abs().max()) < 100
        assert turning.isfinite().all()
