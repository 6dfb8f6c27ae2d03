"""QK-norm's calibrated factor [math.md Q-1], proven against numpy's least squares on the samples."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from solve_problems import SEEDS, few

from trisect.solve.select import denominator


@few
@given(SEEDS, st.integers(1, 3), st.integers(1, 8), st.data())
def test_factor_and_error_are_those_of_least_squares_on_the_samples(
    seed: int, heads: int, width: int, data: st.DataObject
):
    rank = data.draw(st.integers(1, width))
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(heads, 40, width)) * rng.uniform(0.1, 3, size=(heads, 1, width))
    kept = np.stack([rng.permutation(width)[:rank] for _ in range(heads)])
    u = torch.from_numpy(x).square()
    factors, errors = denominator(u.mT @ u / 40, torch.from_numpy(kept))
    for head in range(heads):
        full = (x[head] ** 2).mean(axis=-1)
        part = (x[head][:, kept[head]] ** 2).mean(axis=-1)
        (factor,), *_ = np.linalg.lstsq(part[:, None], full, rcond=None)
        residual = ((full - factor * part) ** 2).sum() / (full**2).sum()
        assert factors[head].item() == pytest.approx(factor, rel=1e-10)
        assert errors[head].item() == pytest.approx(residual, rel=1e-8, abs=1e-12)


def test_all_channels_kept_need_no_correction():
    u = torch.rand(2, 30, 6, dtype=torch.float64)
    factors, errors = denominator(u.mT @ u / 30, torch.arange(6).expand(2, -1))
    torch.testing.assert_close(factors, torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(errors, torch.zeros(2, dtype=torch.float64), atol=1e-12, rtol=0)


def test_a_constant_share_is_corrected_without_error():
    # The dropped channel always holds three times the kept one's energy: mean (1 + 3) / 2 against 1.
    first = torch.rand(1, 30, 1, dtype=torch.float64)
    u = torch.cat([first, 3 * first], dim=-1)
    factors, errors = denominator(u.mT @ u / 30, torch.tensor([[0]]))
    assert factors.item() == pytest.approx(2.0)
    assert errors.item() == pytest.approx(0.0, abs=1e-12)
