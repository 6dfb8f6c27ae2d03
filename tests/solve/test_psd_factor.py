"""`factor` [math.md N-1]: proven against its definition (root^T root = C, inverse a right inverse on the
support) and against numpy's rank and pseudo-inverse, on moments good, bad and rank-deficient."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from solve_problems import SEEDS, few, moment, samples

from trisect.solve.lowrank import factor


@few
@given(SEEDS, st.integers(1, 8), st.sampled_from([1.0, 1e4, 1e10]), st.sampled_from([1e-20, 1.0, 1e20]))
def test_root_and_inverse_are_what_they_are_called(seed: int, width: int, spread: float, scale: float):
    C = scale * moment(samples(seed, tokens=50, width=width, spread=spread))
    F = factor(C)
    eye = torch.eye(width, dtype=torch.float64)
    assert (F.root.mT @ F.root - C).norm() <= 1e-13 * C.norm()
    torch.testing.assert_close(F.root @ F.inverse, eye, rtol=0, atol=1e-9)
    assert F.clipped == 0.0


@few
@given(SEEDS, st.integers(2, 8), st.data())
def test_moments_of_fewer_tokens_than_channels_factor_on_what_they_have_seen(
    seed: int, width: int, data: st.DataObject
):
    tokens = data.draw(st.integers(1, width - 1))
    x = samples(seed, tokens=tokens, width=width)
    C = moment(x)
    F = factor(C)
    assert F.clipped == pytest.approx(1 - np.linalg.matrix_rank(x.numpy()) / width)
    torch.testing.assert_close(F.root.mT @ F.root, C, rtol=0, atol=1e-12 * C.norm().item())
    torch.testing.assert_close(x @ F.inverse @ F.root, x, rtol=0, atol=1e-9)
    pinv = torch.from_numpy(np.linalg.pinv(C.numpy(), rcond=1e-12, hermitian=True))
    assert (F.inverse @ F.inverse.mT - pinv).norm() <= 1e-9 * pinv.norm()


def test_the_floor_is_a_share_of_the_mean_energy():
    # Mean 1 (to 1e-12), so the floor lies at 1e-13 itself.
    C = torch.diag(torch.tensor([3.0 - 2.2e-13, 2e-13, 2e-14], dtype=torch.float64))
    assert factor(C).clipped == pytest.approx(1 / 3)
    assert factor(1e6 * C).clipped == pytest.approx(1 / 3)
    assert factor(C, floor=1e-12).clipped == pytest.approx(2 / 3)
    assert factor(C, floor=1e-15).clipped == 0.0


def test_a_silent_moment_factors_into_zeros():
    F = factor(torch.zeros(3, 3))
    assert F.clipped == 1.0
    assert not F.root.any()
    assert not F.inverse.any()


def test_directions_made_negative_by_rounding_are_silence():
    F = factor(torch.diag(torch.tensor([1.0, -1e-17])))
    assert F.clipped == 0.5
    assert F.root.isfinite().all()
    assert F.inverse.isfinite().all()


def test_a_batch_factors_as_its_members_do_and_shares_one_clipped_number():
    C = torch.stack([moment(samples(seed, tokens=n, width=4)) for seed, n in ((0, 20), (1, 2))])
    F = factor(C)
    for i in range(2):
        torch.testing.assert_close(F.root[i], factor(C[i]).root)
        torch.testing.assert_close(F.inverse[i], factor(C[i]).inverse)
    assert F.clipped == pytest.approx(2 / 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_factors_are_float64_whatever_comes_in(dtype: torch.dtype):
    F = factor(torch.eye(3, dtype=dtype))
    assert F.root.dtype == F.inverse.dtype == torch.float64
