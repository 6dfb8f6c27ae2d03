"""Costs of components add up to the budget, and the knapsack over them finds what exhaustive search finds."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_curves import (
    KEYS,
    MODEL,
    RISES,
    SECONDS,
    curves_from,
    every_choice,
    latency_entries,
    seconds_at,
    shape_with,
    widths_in,
    write_latency,
)
from plan_shapes import SMALL_LAYERS, layer_shape, model_shape

from trisect.config import CompressConfig
from trisect.errors import TrisectError
from trisect.plan import budget_of, plan_for, read_latency
from trisect.plan.allocate import Choice, knapsack, spend
from trisect.plan.budget import FIELDS, Costs
from trisect.records.parts import COMPONENTS

Widths = dict[tuple[int, str], int]


@given(layer=SMALL_LAYERS, unit=st.sampled_from(sorted(FIELDS)), new=st.tuples(*[st.integers(0, 12) for _ in range(3)]))
def test_component_costs_and_the_fixed_rest_are_the_whole_budget(layer, unit, new):
    costs = Costs(shape=model_shape(layer, layer, other=7), unit=unit)
    qk, vo, mlp = new
    narrow = replace(layer, qk=qk, pairs=0, vo=vo, mlp=mlp)
    after = getattr(budget_of(model_shape(layer, narrow, other=7)), FIELDS[unit])
    first = sum(costs.full(0, part) for part in COMPONENTS)
    second = sum(costs.of(1, part, width) for part, width in zip(COMPONENTS, new, strict=True))
    assert first + second + costs.fixed(0) + costs.fixed(1) + (7 if unit == "params" else 0) == after
    assert costs.whole() == getattr(budget_of(costs.shape), FIELDS[unit])


def linear(widths: Widths) -> float:
    return budget_of(shape_with(widths)).linear_parameters


def parameters(widths: Widths) -> float:
    return budget_of(shape_with(widths)).parameters


def cache(widths: Widths) -> float:
    return budget_of(shape_with(widths)).kv_bytes_per_token


def flops(widths: Widths) -> float:
    return budget_of(shape_with(widths)).flops


def seconds(widths: Widths) -> float:
    # Whole nanoseconds, each rounded up: what the planner promises to count.
    return sum(-(-round(seconds_at(key, width) * 1e12) // 1000) for key, width in widths.items())


# How a goal is asked for at a ratio, and the oracle's own count of what it bounds.
GOALS: dict[str, tuple[Callable[[float, float], dict[str, object]], Callable[[Widths], float]]] = {
    "ratio": (lambda ratio, full: {"ratio": ratio}, linear),
    "target_params": (lambda ratio, full: {"target_params": int((1 - Fraction(str(ratio))) * full)}, parameters),
    "kv_ratio": (lambda ratio, full: {"kv_ratio": ratio}, cache),
    "target_kv_bytes": (lambda ratio, full: {"target_kv_bytes": int((1 - Fraction(str(ratio))) * full)}, cache),
    "flops": (lambda ratio, full: {"ratio": ratio, "budget": "flops"}, flops),
    "latency": (lambda ratio, full: {"ratio": ratio, "budget": "latency"}, seconds),
}
CHOICES = list(every_choice())
DENSE = max(CHOICES, key=linear)
COUNTS = {name: [count(choice) for choice in CHOICES] for name, (_, count) in GOALS.items()}


@pytest.mark.parametrize("goal", sorted(GOALS))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rises=RISES, percent=st.integers(1, 40))
def test_a_balanced_plan_loses_no_more_than_what_exhaustive_search_finds(
    tmp_path: Path, goal: str, rises: list[list[float]], percent: int
) -> None:
    ask, count = GOALS[goal]
    curves, ratio = curves_from(rises), percent / 100
    allowed = (1 - Fraction(str(ratio))) * Fraction(count(DENSE))
    settings = ask(ratio, count(DENSE))
    if goal == "latency":
        settings["latency_table"] = str(write_latency(tmp_path))
    fitting = [choice for choice, cost in zip(CHOICES, COUNTS[goal], strict=True) if cost <= allowed]
    config = CompressConfig(allocate="balanced", align=8, **settings)
    if not fitting:
        with pytest.raises(TrisectError, match="reach"):
            plan_for(MODEL, config, curves)
        return
    best = min(loss(curves, choice) for choice in fitting)
    steps = [count(DENSE) - count({**DENSE, key: width}) for key, width in first_steps().items()]
    if not goal.startswith("target") and count(DENSE) - min(step for step in steps if step > 0) < allowed:
        with pytest.raises(TrisectError, match="removes nothing"):
            plan_for(MODEL, config, curves)
        return
    widths = widths_in(plan_for(MODEL, config, curves))
    assert widths in CHOICES
    if goal.startswith("target"):
        assert count(widths) <= allowed, "over budget"
        assert loss(curves, widths) == pytest.approx(best, abs=1e-9)
        return
    assert 0 <= count(widths) - allowed < max(steps), "no more than asked for, and less by no whole step"
    if sum(widths[key] != width for key, width in DENSE.items()) > 1:
        assert loss(curves, widths) <= best + 1e-9


def first_steps() -> Widths:
    return {key: max(choice[key] for choice in CHOICES if choice[key] < DENSE[key]) for key in KEYS}


def loss(curves, widths: Widths) -> float:
    return sum(curves.points[key][width] for key, width in widths.items())


@settings(max_examples=60)
@given(data=st.data(), percent=st.integers(1, 39))
def test_whatever_is_left_of_a_budget_is_less_than_the_next_step(data, percent):
    # Flat curves give no reason to spend, and still the target is met to within one step.
    flat = data.draw(st.booleans())
    curves = curves_from([[0.0] * 3] * len(KEYS) if flat else data.draw(RISES))
    outside = int(parameters(DENSE) - linear(DENSE))
    allowed = math.floor((1 - Fraction(percent, 100)) * int(linear(DENSE)))
    config = CompressConfig(target_params=allowed + outside, allocate="balanced", align=8)
    widths = widths_in(plan_for(MODEL, config, curves))
    left = allowed + outside - int(parameters(widths))
    assert left >= 0
    for key, width in widths.items():
        wider = [w for w in curves.points[key] if w > width]
        if wider:
            assert parameters({**widths, key: min(wider)}) - parameters(widths) > left


costly = st.lists(
    st.builds(Choice, widths=st.just(()), cost=st.integers(0, 10_000), loss=st.floats(0, 10)), min_size=1, max_size=4
)


@settings(max_examples=80)
@given(items=st.lists(costly, min_size=1, max_size=4), budget=st.integers(0, 40_000), table=st.integers(4, 64))
def test_a_coarse_table_is_never_over_and_as_good_as_a_slightly_smaller_budget(items, budget, table):
    picked = knapsack(items, budget=budget, table=table)
    exact = knapsack(items, budget=budget, table=1 << 30)
    assert (picked is None) == (exact is None)
    if picked is None:
        return
    assert sum(choice.cost for choice in picked) <= budget
    unit = -(-budget // table)
    smaller = knapsack(items, budget=budget - unit * len(items), table=1 << 30)
    if smaller is not None:
        assert total(picked) <= total(smaller) + 1e-9
    assert total(exact) <= total(picked) + 1e-9


def total(choices: list[Choice]) -> float:
    return sum(choice.loss for choice in choices)


def test_what_a_coarse_table_leaves_over_is_spent():
    items = [
        [Choice(widths=(((0, "mlp"), w),), cost=100 * w + w % 7, loss=10 - w) for w in range(1, 11)] for _ in range(5)
    ]
    coarse = knapsack(items, budget=3021, table=4)
    assert coarse is not None
    assert sum(choice.cost for choice in coarse) < 3021 - 107
    picked = spend(items, budget=3021, table=4)
    assert 3021 - 107 < sum(choice.cost for choice in picked) <= 3021


def test_latency_is_straight_between_measured_widths_and_flat_below_them(tmp_path: Path):
    table = read_latency(write_latency(tmp_path))
    first = MODEL.layers[0]
    assert table.nanoseconds(first, "qk", 32) == 90
    assert table.nanoseconds(first, "qk", 24) == 65
    assert table.nanoseconds(first, "ov", 18) == 52  # 51.25, rounded up
    assert table.nanoseconds(first, "qk", 8) == table.nanoseconds(first, "qk", 16) == 40
    assert (table.device, table.dtype) == ("test", "float32")
    assert sorted(map(str, table.to_dict()["entries"])) == sorted(
        str({**row, "heads": 0, "kv_heads": 0} if row["component"] == "mlp" else row)
        for row in latency_entries()["entries"]
    )


def test_a_shape_that_was_not_measured_names_the_command(tmp_path: Path):
    table = read_latency(write_latency(tmp_path))
    wider = layer_shape(qk=64, pairs=32, vo=32, mlp=256, d_model=32, heads=4, kv_heads=2)
    with pytest.raises(TrisectError, match=r"no time for qk .*width 64.*trisect bench MODEL --latency-table"):
        table.nanoseconds(wider, "qk", 64)
    other = layer_shape(qk=32, pairs=16, vo=32, mlp=256, d_model=40)
    with pytest.raises(TrisectError, match="d_model 40"):
        table.nanoseconds(other, "mlp", 256)


@pytest.mark.parametrize("text", ["", "[]", '{"entries": [{}]}', json.dumps({"entries": [{"component": "qk"}]})])
def test_a_broken_table_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TrisectError, match="trisect bench"):
        read_latency(path)


def test_a_time_that_is_none_is_refused(tmp_path: Path):
    data = latency_entries()
    data["entries"][0]["seconds"] = -1
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(TrisectError, match=r"seconds must be greater than 0, not -1"):
        read_latency(tmp_path / "t.json")
    assert len(SECONDS) == len(KEYS)
