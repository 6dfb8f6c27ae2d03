"""Axes hold their values, and ticks are few and round."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trisect.report.scale import axis_for, tick_step

VALUES = st.lists(st.floats(-1e9, 1e9, allow_subnormal=False), min_size=1, max_size=8)


@given(VALUES)
def test_every_value_has_a_place_on_the_axis(values: list[float]) -> None:
    axis = axis_for(values)
    assert all(-1e-9 <= axis.place(value) <= 1 + 1e-9 for value in values)
    assert axis.place(axis.low) == 0
    assert axis.place(axis.high) == 1
    assert 2 <= len(axis.ticks) <= 8
    assert list(axis.ticks) == sorted(set(axis.ticks))


@given(st.lists(st.floats(1e-6, 1e9), min_size=2, max_size=8))
def test_logarithmic_axes_hold_their_values_in_order(values: list[float]) -> None:
    axis = axis_for(values, log=True)
    places = [axis.place(value) for value in sorted(values)]
    assert places == sorted(places)
    assert -1e-9 <= places[0]
    assert places[-1] <= 1 + 1e-9
    assert axis.log == (max(values) / min(values) > 20)
    assert axis.ticks


def test_equal_steps_are_equal_on_a_linear_axis_and_equal_factors_on_a_logarithmic_one() -> None:
    linear, log = axis_for([0, 10]), axis_for([1, 1000], log=True)
    assert linear.place(4) - linear.place(2) == pytest.approx(linear.place(8) - linear.place(6))
    assert log.place(10) - log.place(1) == pytest.approx(log.place(1000) - log.place(100))


@pytest.mark.parametrize(("span", "step"), [(1, 0.2), (5, 1), (7, 2), (49, 10), (0.011, 0.005)])
def test_steps_are_one_two_or_five_times_a_power_of_ten(span: float, step: float) -> None:
    assert tick_step(span) == pytest.approx(step)


@pytest.mark.parametrize("values", [[1e9, 1e9 + 1e-6], [3e-15, 4e-15], [1e-300, 2e-300], [0.0]])
def test_values_that_are_tiny_or_almost_equal_have_an_axis_too(values: list[float]) -> None:
    axis = axis_for(values)
    assert axis.low < axis.high
    assert all(0 <= axis.place(value) <= 1 for value in values)


def test_what_cannot_be_logarithmic_is_linear() -> None:
    assert not axis_for([0.0, 1e6], log=True).log
    assert not axis_for([-1.0, 1e6], log=True).log
    assert math.isfinite(axis_for([3.0]).place(3.0))
