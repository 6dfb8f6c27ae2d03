"""docs/quantize.md says what the receipts say, and the claim made there holds in them."""

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def made(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("quantise_tables")


def test_the_tables_are_those_of_the_receipts(made: ModuleType) -> None:
    text = made.DOCUMENT.read_text(encoding="utf-8")
    assert all(f"<!-- table:{name} -->" in text for name in made.TABLES)
    assert made.filled(text) == text, "run `python experiments/quantise_tables.py`"


@pytest.mark.parametrize("study", ["stories15m", "smollm2"])
def test_at_least_two_narrow_quantised_points_lie_below_the_line_of_pure_hqq(
    made: ModuleType, study: str
) -> None:
    found = made.points(study)
    line = made.pure_line(found)
    assert {point.setting[:2] for point in line} == {"b2", "b3", "b4", "b8"}
    there = {point: made.line_at(line, point.bits) for point in found if point.mixed}
    assert sum(value is not None and point.perplexity < value for point, value in there.items()) >= 2


def test_the_line_goes_through_its_points_and_leaves_out_what_another_beats(made: ModuleType) -> None:
    known = [(2.0, 90.0), (3.0, 40.0), (3.5, 50.0), (4.0, 10.0)]
    line = made.pure_line([made.Point("dense", 0.0, "b3-g8", *pair) for pair in known])
    assert [(point.bits, point.perplexity) for point in line] == [(2.0, 90.0), (3.0, 40.0), (4.0, 10.0)]
    assert made.line_at(line, 3.0) == pytest.approx(40.0)
    assert made.line_at(line, 3.5) == pytest.approx(20.0)  # the geometric mean of 40 and 10
    assert made.line_at(line, 4.5) is None
