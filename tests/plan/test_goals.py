"""Every goal is read, refused or reached: never over, met to within one step, floors held."""

import itertools
import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_curves import KEYS, LAYERS, MODEL, RISES, STEPS, curves_from, widths_in, write_latency
from plan_shapes import layer_shape, model_shape, uniform_plan

from trisect.config import CompressConfig
from trisect.config.goals import Increase, Limit, Share, parse_increase, parse_size
from trisect.errors import TrisectError
from trisect.plan import Curves, apply_plan, budget_of, compare, plan_for
from trisect.plan.problem import problem_for
from trisect.records.parts import COMPONENTS

FLAT = curves_from([[0.1, 0.1, 0.1]] * len(KEYS))
ALLOCATIONS = ("uniform", "search", "balanced")


@pytest.mark.parametrize(
    ("text", "count"),
    [("100M", 10**8), ("1.2B", 12 * 10**8), ("95_000_000", 95_000_000), ("95,000,000", 95_000_000)]
    + [("7k", 7000), ("1e8", 10**8), (5, 5), ("0.5T", 5 * 10**11), (" 3 G ", 3 * 10**9)],
)
def test_numbers_of_parameters_are_read(text, count):
    assert parse_size("target_params", text) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [("20K", 20_000), ("20KiB", 20_480), ("20kb", 20_000), ("20480", 20_480), ("1.5MiB", 3 << 19), ("64B", 64)],
)
def test_numbers_of_bytes_are_read(text, count):
    assert parse_size("target_kv_bytes", text) == count


@pytest.mark.parametrize("text", ["100Q", "", "M", "-5", "0", "1..2", "nan", "inf", True, None, "0.5", "5KiM"])
def test_what_is_no_number_is_refused_with_one_that_is(text):
    with pytest.raises(TrisectError, match=r"--target-params 100M"):
        parse_size("target_params", text)
    with pytest.raises(TrisectError, match=r"--target-kv-bytes 20K"):
        parse_size("target_kv_bytes", text)


def test_increases_are_relative_or_absolute():
    assert parse_increase("5%") == Increase(budget="params", amount=0.05, relative=True)
    assert parse_increase(1.5) == parse_increase("1.5") == Increase(budget="params", amount=1.5, relative=False)
    assert parse_increase("5%").nats(3.0) == pytest.approx(math.log(1.05))
    dense = 2.5
    after = dense + parse_increase(1.5).nats(dense)
    assert math.exp(after) - math.exp(dense) == pytest.approx(1.5)


@pytest.mark.parametrize("text", ["five", "0", "0%", "-5%", "%", "nan", "inf%", True])
def test_an_increase_that_is_none_is_refused(text):
    with pytest.raises(TrisectError, match=r"--max-ppl-increase 5%"):
        parse_increase(text)


@pytest.mark.parametrize("floor", ["1.5", -0.1, "qk=0.5", "0.25", {"mlp": 0.5}, True, float("nan"), None])
def test_a_floor_that_is_no_share_is_refused(floor):
    with pytest.raises(TrisectError, match="floor must be"):
        CompressConfig(ratio=0.25, floor=floor)


@pytest.mark.parametrize(
    ("settings", "goal"),
    [
        ({"ratio": 0.25}, Share(budget="params", removed=0.25)),
        ({"ratio": 0.25, "budget": "flops"}, Share(budget="flops", removed=0.25)),
        ({"kv_ratio": 0.5}, Share(budget="kv", removed=0.5)),
        ({"target_params": "100M"}, Limit(budget="params", most=10**8)),
        ({"target_kv_bytes": "20K"}, Limit(budget="kv", most=20_000)),
        ({"max_ppl_increase": "5%", "budget": "kv"}, Increase(budget="kv", amount=0.05, relative=True)),
    ],
)
def test_a_config_has_one_goal_and_survives_json(settings, goal):
    config = CompressConfig.from_dict(settings)
    assert config.goal == goal
    assert CompressConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_config_written_before_there_were_goals_still_loads():
    old = CompressConfig(ratio=0.3).to_dict()
    for name in ("kv_ratio", "target_params", "target_kv_bytes", "max_ppl_increase", "budget"):
        del old[name]
    del old["latency_table"], old["floor"]
    assert CompressConfig.from_dict({**old, "allocate": "uniform"}).ratio == 0.3


def test_a_kv_goal_leaves_what_holds_no_cache_alone():
    assert CompressConfig(kv_ratio=0.5).parts == ("qk", "ov")
    assert CompressConfig(ratio=0.5, budget="kv", parts=("ov", "mlp")).parts == ("ov",)
    assert CompressConfig(ratio=0.5).parts == COMPONENTS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "--ratio 0.25"),
        ({"ratio": 0.25, "kv_ratio": 0.5}, "--ratio and --kv-ratio were given together"),
        ({"target_params": "100Q"}, "100Q"),
        ({"target_params": 0}, "--target-params 100M"),
        ({"kv_ratio": 0.5, "parts": "mlp"}, "--parts qk,ov"),
        ({"target_kv_bytes": 99, "parts": ["mlp"]}, "--parts qk,ov"),
        ({"ratio": 0.2, "budget": "kvs"}, "Did you mean kv?"),
        ({"kv_ratio": 0.2, "budget": "flops"}, "leave --budget flops out"),
        ({"ratio": 0.2, "budget": "latency"}, "--latency-table FILE"),
        ({"ratio": 0.2, "latency_table": "t.json"}, "--budget latency"),
        ({"ratio": 0.2, "floor": 1.5}, "less than or equal to 1"),
        ({"ratio": 0.2, "allocate": "serch"}, "Did you mean search?"),
        ({"kv_ratio": 1}, "ratio"),
        ({"max_ppl_increase": "lots"}, "5%"),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(TrisectError) as refusal:
        CompressConfig.from_dict(settings)
    assert message in str(refusal.value)


GOALS = {
    "kv": lambda ratio: {"kv_ratio": ratio},
    "kv bytes": lambda ratio: {"target_kv_bytes": math.floor((1 - ratio) * budget_of(MODEL).kv_bytes_per_token)},
    "flops": lambda ratio: {"ratio": ratio, "budget": "flops"},
    "params": lambda ratio: {"target_params": math.floor((1 - ratio) * budget_of(MODEL).parameters)},
    "curved": lambda ratio: {"ratio": ratio},
}


@pytest.mark.parametrize(("goal", "allocate"), list(itertools.product(sorted(GOALS), ALLOCATIONS)))
@settings(max_examples=15)
@given(rises=RISES, percent=st.integers(1, 35))
def test_every_allocation_meets_its_budget_to_one_step_and_from_its_own_side(goal, allocate, rises, percent):
    config = CompressConfig(allocate=allocate, align=8, **GOALS[goal](percent / 100))
    curves, problem = curves_from(rises), problem_for(MODEL, config)
    wide = {key: LAYERS[key[0]].width(key[1]) for key in problem.keys}
    share = isinstance(problem.config.goal, Share)
    if share and problem.full - problem.budget < min(saved(problem, key, wide[key]) for key in wide):
        with pytest.raises(TrisectError, match="removes nothing"):
            plan_for(MODEL, config, curves)
        return
    widths = widths_in(plan_for(MODEL, config, curves))
    chosen = {key: widths[key] for key in problem.keys}
    assert all(widths[key] == LAYERS[key[0]].width(key[1]) for key in set(KEYS) - set(problem.keys))
    left = problem.cost(chosen) - problem.budget
    if share:  # removed no more than asked for, and less by no whole step
        assert 0 <= left < max(saved(problem, key, wide[key]) for key in chosen)
        return
    assert left <= 0, "over the limit"
    for key, width in chosen.items():
        wider = min(wide[key], width + STEPS[key[1]])
        assert width == wide[key] or saved(problem, key, wider) > -left, "one step more would fit"


def saved(problem, key: tuple[int, str], width: int) -> int:
    """What the step below this width saves."""
    return problem.costs.of(*key, width) - problem.costs.of(*key, width - STEPS[key[1]])


@pytest.mark.parametrize("allocate", ALLOCATIONS)
@pytest.mark.parametrize("settings", [{"ratio": 0.1}, {"kv_ratio": 0.1}, {"ratio": 0.1, "budget": "flops"}])
def test_floors_are_held(allocate, settings):
    config = CompressConfig.from_dict({**settings, "allocate": allocate, "align": 8, "floor": 0.7})
    widths = widths_in(plan_for(MODEL, config, FLAT))
    problem = problem_for(MODEL, config)
    for (layer, part), width in widths.items():
        assert width >= config.floor_of(part) * LAYERS[layer].width(part)
    assert problem.cost({key: widths[key] for key in problem.keys}) >= problem.budget
    assert any(width < LAYERS[layer].width(part) for (layer, part), width in widths.items())
    with pytest.raises(TrisectError, match="too narrow to be cut"):
        plan_for(MODEL, replace(config, floor=0.99), FLAT)


def test_a_floor_that_nothing_meets_changes_nothing():
    plain = uniform_plan(MODEL, ratio=0.25, parts=COMPONENTS, layers=None, align=8)
    config = CompressConfig.from_dict({"ratio": 0.25, "method": "a3", "align": 8, "floor": 0.5})
    assert plan_for(MODEL, config) == plain
    assert plan_for(MODEL, CompressConfig(ratio=0.25, method="a3", align=8)) == plain


def test_the_ratio_in_a_plan_is_the_one_asked_for_or_else_the_one_reached():
    balanced = plan_for(MODEL, CompressConfig(ratio=0.2, align=8, allocate="balanced"), FLAT)
    assert balanced.ratio == 0.2
    for asked in ({"kv_ratio": 0.25}, {"ratio": 0.2, "budget": "flops"}, {"target_params": 30_000}):
        plan = plan_for(MODEL, CompressConfig(align=8, **asked))
        removed = compare(budget_of(MODEL), budget_of(apply_plan(MODEL, plan))).ratio
        assert plan.ratio == pytest.approx(removed)


def test_a_latency_budget_is_planned_from_its_table(tmp_path: Path):
    table = str(write_latency(tmp_path))
    for allocate in ALLOCATIONS:
        config = CompressConfig(
            ratio=0.2, budget="latency", latency_table=table, allocate=allocate, align=8, parts=("mlp", "ov")
        )
        problem = problem_for(MODEL, config)
        widths = widths_in(plan_for(MODEL, config, FLAT))
        assert problem.budget <= problem.cost({key: widths[key] for key in problem.keys}) < problem.full
        assert problem.budget == math.ceil(Fraction("0.8") * (80 + 75 + 400 + 300))


@pytest.mark.parametrize("allocate", ALLOCATIONS)
def test_what_cannot_be_reached_says_what_can(allocate):
    with pytest.raises(TrisectError, match="cannot be reached") as refusal:
        plan_for(MODEL, CompressConfig(target_params=2000, align=8, allocate=allocate), FLAT)
    least = int(str(refusal.value).split("leave ")[1].split(";")[0].replace(",", ""))
    reached = plan_for(MODEL, CompressConfig(target_params=least, align=8, allocate=allocate), FLAT)
    assert budget_of(apply_plan(MODEL, reached)).parameters == least
    with pytest.raises(TrisectError, match="out of reach") as refusal:
        plan_for(MODEL, CompressConfig(kv_ratio=0.9, align=8, allocate=allocate), FLAT)
    reach = float(str(refusal.value).split("reach ")[1].split(";")[0])
    plan_for(MODEL, CompressConfig(kv_ratio=reach, align=8, allocate=allocate), FLAT)
    with pytest.raises(TrisectError, match=r"already fits 1,000,000 parameters"):
        plan_for(MODEL, CompressConfig(target_params=10**6, allocate=allocate), FLAT)


def test_a_bound_on_perplexity_is_not_planned_without_curves():
    with pytest.raises(TrisectError, match="Only loss curves can predict perplexity"):
        plan_for(MODEL, CompressConfig(max_ppl_increase="5%"))


def test_curves_of_other_parts_or_models_are_refused():
    partial = Curves(points={key: FLAT.points[key] for key in KEYS[:2]}, fingerprint="f", token_hash="t")
    with pytest.raises(TrisectError, match="none for mlp of layer 0"):
        plan_for(MODEL, CompressConfig(ratio=0.1, allocate="balanced", align=8), partial)
    other = model_shape(*[layer_shape(qk=64, pairs=32, vo=64, mlp=512)] * 2)
    with pytest.raises(TrisectError, match="another model's"):
        plan_for(other, CompressConfig(ratio=0.1, allocate="search", align=8), FLAT)
    with pytest.raises(TrisectError, match="--curves FILE"):
        plan_for(MODEL, CompressConfig(ratio=0.1, allocate="search"))
