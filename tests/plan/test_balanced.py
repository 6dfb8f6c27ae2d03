"""The balanced plan: exact under its budget, against exhaustive search and hand-made curves."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trisect.config import CompressConfig
from trisect.errors import TrisectError
from trisect.plan import Curves, Plan, budget_of, plan_for, read_curves
from trisect.plan.allocate import Choice, knapsack
from trisect.records.plan import apply_plan
from trisect.records.shapes import LayerShape, ModelShape

LAYER = LayerShape(d_model=64, heads=4, kv_heads=2, qk=64, pairs=32, vo=64, mlp=512, gated=True)
MODEL = ModelShape(layers=(LAYER,) * 3, other_parameters=1000, bytes_per_element=2)

choices = st.lists(
    st.builds(
        Choice, widths=st.just(()), cost=st.integers(1, 6).map(lambda n: 4 * n), loss=st.floats(0, 10, allow_nan=False)
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=80)
@given(items=st.lists(choices, min_size=1, max_size=4), budget=st.integers(4, 80))
def test_the_knapsack_finds_what_exhaustive_search_finds(items: list[list[Choice]], budget: int) -> None:
    every = [c for c in itertools.product(*items) if sum(x.cost for x in c) <= budget]
    picked = knapsack(items, budget=budget)
    if not every:
        assert picked is None
        return
    assert picked is not None
    assert all(choice in item for choice, item in zip(picked, items, strict=True))
    assert sum(x.cost for x in picked) <= budget
    best = min(sum(x.loss for x in c) for c in every)
    assert sum(x.loss for x in picked) == pytest.approx(best, abs=1e-9)


def curves(steepness: dict[tuple[int, str], float]) -> Curves:
    """Straight curves down to a quarter of each width."""
    full = {"qk": 64, "ov": 64, "mlp": 512}
    points = {
        (layer, part): {
            int(full[part] * share): (1 - share) * steepness.get((layer, part), 1.0) for share in (1.0, 0.75, 0.5, 0.25)
        }
        for layer in range(3)
        for part in full
    }
    return Curves(points=points, fingerprint="f", token_hash="t")


def plan(ratio: float, steepness: dict[tuple[int, str], float], **settings: Any) -> Plan:
    config = CompressConfig(ratio=ratio, allocate="balanced", method="a3+", **{"align": 16, **settings})
    return plan_for(MODEL, config, curves(steepness))


@settings(max_examples=25)
@given(percent=st.integers(1, 70), align=st.sampled_from([8, 16, None]))
def test_no_more_is_removed_than_asked_and_less_by_no_whole_step(percent: int, align: int | None) -> None:
    if percent < 100 * 3072 / 442368 * (2 if align == 16 else 1):  # not even the smallest step
        with pytest.raises(TrisectError, match="removes nothing"):
            plan(percent / 100, {}, align=align)
        return
    after = budget_of(apply_plan(MODEL, plan(percent / 100, {}, align=align)))
    full = budget_of(MODEL).linear_parameters
    largest_step = 64 * 3 * (128 if align == 16 else 64)
    assert 0 <= 100 * after.linear_parameters - (100 - percent) * full < 100 * largest_step


def test_what_costs_most_is_cut_least() -> None:
    cheap_last = {(layer, part): 10.0 for layer in (0, 1) for part in ("qk", "ov", "mlp")}
    widths = plan(0.2, cheap_last).layers
    assert widths[2].mlp < 512
    assert widths[0].mlp == widths[1].mlp == 512
    assert widths[0].qk == widths[1].vo == 64


def test_only_the_chosen_layers_and_parts_are_cut() -> None:
    result = plan(0.3, {}, parts=("ov",), layers=(1,))
    assert [w.vo for w in result.layers] == [64, 48, 64]
    assert {w.mlp for w in result.layers} == {512}
    assert all(2 * w.pairs == w.qk for w in result.layers)


def test_a_ratio_beyond_the_curves_says_how_far_they_reach() -> None:
    with pytest.raises(TrisectError, match=r"reach 0\.75"):
        plan(0.9, {})


def test_curves_between_points_are_powers_and_their_slopes_never_fall() -> None:
    square = Curves(points={(0, "qk"): {64: 0.0, 48: 0.1, 16: 0.9}}, fingerprint="f", token_hash="t")
    assert square.loss_at(0, "qk", 32) == pytest.approx(0.4)
    bumpy = Curves(points={(0, "qk"): {64: 0.0, 48: 0.4, 32: 0.2}}, fingerprint="f", token_hash="t")
    assert bumpy.loss_at(0, "qk", 64) == 0
    assert bumpy.loss_at(0, "qk", 56) == pytest.approx(0.2)
    assert bumpy.loss_at(0, "qk", 48) == pytest.approx(0.4)
    assert bumpy.loss_at(0, "qk", 40) == pytest.approx(0.6)
    with pytest.raises(TrisectError, match="ends at width 32"):
        bumpy.loss_at(0, "qk", 16)


def test_curves_survive_the_disk_and_refuse_another_model(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    path.write_text(json.dumps(curves({}).to_dict()))
    assert read_curves(path, fingerprint="f") == curves({})
    with pytest.raises(TrisectError, match="another model"):
        read_curves(path, fingerprint="g")
    path.write_text("{}")
    with pytest.raises(TrisectError, match="Cannot read loss curves"):
        read_curves(path)
