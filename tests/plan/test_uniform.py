"""Uniform plans: no more is removed than asked for, less by no whole step, and evenly over the layers."""

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_shapes import layer_shape, model_shape

from trisect.config import CompressConfig
from trisect.errors import TrisectError
from trisect.plan import Plan, plan_for
from trisect.plan.problem import MLP_STEPS, grid_of, problem_for
from trisect.records.parts import COMPONENTS
from trisect.records.shapes import LayerShape, ModelShape

HEADS = st.sampled_from([48, 64, 80, 128])
LAYERS = st.builds(
    lambda qk, vo, rotary, group, kv_heads, **more: layer_shape(
        qk=qk, vo=vo, pairs=int(rotary * qk / 2), heads=group * kv_heads, kv_heads=kv_heads, **more
    ),
    qk=HEADS,
    vo=HEADS,
    rotary=st.sampled_from([0, 0.25, 0.5, 1]),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 4),
    mlp=st.sampled_from([256, 768, 1000, 1536, 2731, 4096]),
    d_model=st.sampled_from([64, 288, 576]),
    gated=st.booleans(),
)
SHAPES = st.one_of(
    st.builds(lambda layer, n: model_shape(*[layer] * n), LAYERS, st.integers(1, 31)),
    st.lists(LAYERS, min_size=2, max_size=5).map(lambda layers: model_shape(*layers, *layers)),
)
PARTS = st.sampled_from(
    [parts for n in (1, 2, 3) for parts in itertools.combinations(COMPONENTS, n)]
    + [COMPONENTS] * 7  # the usual choice more often
)
FLOORS = st.just(0.0) | st.floats(0, 0.9)
PERCENTS = st.integers(1, 90)


@st.composite
def questions(draw: st.DrawFn) -> tuple[ModelShape, CompressConfig]:
    shape = draw(SHAPES)
    indices = st.sets(st.integers(0, len(shape.layers) - 1), min_size=1).map(lambda s: tuple(sorted(s)))
    goal, budget = draw(
        st.sampled_from([("ratio", "params"), ("ratio", "flops"), ("kv_ratio", "kv"), ("ratio", "params")])
    )
    parts = draw(PARTS)
    assume(goal != "kv_ratio" or parts != ("mlp",))
    return shape, CompressConfig(
        **{goal: draw(PERCENTS) / 100},
        budget="params" if budget == "kv" else budget,
        parts=parts,
        layers=draw(st.none() | indices),
        align=draw(st.sampled_from([8, 16, 32])),
        floor=draw(FLOORS),
        method="a3",
    )


def planned(shape: ModelShape, config: CompressConfig) -> Plan:
    """The plan; what is out of reach is no matter here."""
    try:
        return plan_for(shape, config)
    except TrisectError as error:
        assume("out of reach" not in str(error) and "too narrow" not in str(error))
        assume("removes nothing" not in str(error))
        raise


def next_width(layer: LayerShape, part: str, width: int, align: int) -> int:
    step = MLP_STEPS[align] if part == "mlp" else align
    return (width - 1) // step * step


@settings(max_examples=300)
@given(question=questions())
def test_no_more_is_removed_than_asked_and_no_single_step_is_left_that_fits(question):
    shape, config = question
    plan, problem = planned(shape, config), problem_for(shape, config)
    chosen = {key: plan.layers[key[0]].of(key[1]) for key in problem.keys}
    share = Fraction(str(config.ratio or config.kv_ratio))
    before = problem.full + problem.fixed
    removed = problem.full - problem.cost(chosen)
    assert removed <= share * before
    for (index, part), width in chosen.items():
        narrower = next_width(shape.layers[index], part, width, config.align)
        if narrower >= problem.lowest((index, part)):
            step = problem.costs.of(index, part, width) - problem.costs.of(index, part, narrower)
            assert removed + step > share * before


@settings(max_examples=150)
@given(question=questions())
def test_widths_are_on_the_grid_at_or_above_their_floors_and_never_wider_than_before(question):
    shape, config = question
    plan = planned(shape, config)
    keys = problem_for(shape, config).keys
    for index, (layer, widths) in enumerate(zip(shape.layers, plan.layers, strict=True)):
        for part in COMPONENTS:
            width, full = widths.of(part), layer.width(part)
            if (index, part) not in keys:
                assert width == full
                continue
            assert width <= full
            assert width >= config.floor_of(part) * full
            assert width == full or width % (MLP_STEPS[config.align] if part == "mlp" else config.align) == 0
    assert plan_for(shape, config) == plan, "the same question has the same answer"


@settings(max_examples=150)
@given(layer=LAYERS, n=st.integers(1, 40), percent=PERCENTS, align=st.sampled_from([8, 16, 32]))
def test_layers_that_are_alike_differ_by_one_step_and_the_narrower_ones_lie_evenly(layer, n, percent, align):
    plan = planned(model_shape(*[layer] * n), CompressConfig(ratio=percent / 100, align=align, method="a3"))
    for part in COMPONENTS:
        widths = [widths.of(part) for widths in plan.layers]
        wide, narrow = max(widths), min(widths)
        if wide == narrow:
            continue
        assert narrow == next_width(layer, part, wide, align)
        where = [index for index, width in enumerate(widths) if width == narrow]
        gaps = [b - a for a, b in zip([-1, *where], [*where, n], strict=True)]
        if part == "ov" and widths != [widths.qk for widths in plan.layers]:
            assert max(gaps) <= 2 * -(-n // len(where))  # one of the layers may have narrow queries alone
            continue
        assert max(gaps) <= -(-n // len(where)), "no run of wide layers is longer than their share"
        inner = gaps[1:-1]
        assert not inner or max(inner) - min(inner) <= 1


@settings(max_examples=60)
@given(
    qk=st.sampled_from([48, 64]),
    mlp=st.sampled_from([256, 300, 512]),
    n=st.integers(1, 3),
    percent=st.integers(3, 70),
    heads=st.sampled_from([(2, 1), (4, 4)]),
)
def test_no_other_even_plan_is_much_nearer_to_its_exact_widths(qk, mlp, n, percent, heads):
    """Against all numbers of steps: of those where no other fits, the best is less than a step better."""
    layer = layer_shape(qk=qk, vo=qk, pairs=0, mlp=mlp, heads=heads[0], kv_heads=heads[1])
    shape, config = model_shape(*[layer] * n), CompressConfig(ratio=percent / 100, method="a3")
    plan, problem = planned(shape, config), problem_for(shape, config)
    levels = [[w for w in range(qk, 15, -16)], [w for w in range(qk, 15, -16)], mlp_levels(mlp)]
    totals = [sorted({sum(c) for c in even(widths, n)}) for widths in levels]
    price = [problem.costs.of(0, part, 1) for part in COMPONENTS]

    def cost(sums: tuple[int, ...]) -> int:
        return sum(p * s for p, s in zip(price, sums, strict=True))

    def distance(sums: tuple[int, ...]) -> Fraction:
        kept = [Fraction(s, n * layer.width(part)) for s, part in zip(sums, COMPONENTS, strict=True)]
        return max(abs(share - (1 - Fraction(percent, 100))) for share in kept)

    full = [
        sums
        for sums in itertools.product(*totals)
        if cost(sums) >= problem.budget
        and not any(
            cost((*sums[:i], below, *sums[i + 1 :])) >= problem.budget
            for i in range(3)
            for below in [s for s in totals[i] if s < sums[i]][-1:]
        )
    ]
    mine = tuple(sum(widths.of(part) for widths in plan.layers) for part in COMPONENTS)
    assert mine in full
    step = max(Fraction(16, n * qk), Fraction(128, n * mlp))
    assert distance(mine) < min(map(distance, full)) + step


def mlp_levels(mlp: int) -> list[int]:
    return [mlp, *range((mlp - 1) // 128 * 128, 127, -128)]


def even(widths: list[int], n: int) -> list[tuple[int, ...]]:
    """All layers at one width, or some of them at the next."""
    pairs = list(itertools.pairwise(widths))
    return [(w,) * n for w in widths] + [(a,) * (n - k) + (b,) * k for a, b in pairs for k in range(n)]


def of_heads(qk: int, mlp: int, *, heads: tuple[int, int], d_model: int, n: int) -> ModelShape:
    h, k = heads
    layer = layer_shape(qk=qk, vo=qk, pairs=qk // 2, mlp=mlp, heads=h, kv_heads=k, d_model=d_model)
    return model_shape(*[layer] * n)


SMOLLM2 = of_heads(64, 1536, heads=(9, 3), d_model=576, n=30)
STORIES = of_heads(48, 768, heads=(6, 6), d_model=288, n=6)


@pytest.mark.parametrize(
    ("ratio", "align", "head", "mlp"),
    [(0.25, 16, 48, 1152), (0.125, 8, 56, 1344), (0.25, 8, 48, 1152), (0.375, 8, 40, 960)]
    + [(0.125, None, 56, 1344), (0.25, None, 48, 1152), (0.375, None, 40, 960)],
)
def test_what_one_width_for_all_layers_meets_has_one(ratio, align, head, mlp):
    plan = plan_for(SMOLLM2, CompressConfig(ratio=ratio, align=align))
    assert {(widths.qk, widths.vo, widths.mlp) for widths in plan.layers} == {(head, head, mlp)}


def test_heads_that_the_grid_would_cut_by_a_third_are_cut_in_some_layers():
    problem = problem_for(STORIES, CompressConfig(ratio=0.25))
    plan = plan_for(STORIES, CompressConfig(ratio=0.25))
    assert problem.cost({key: plan.layers[key[0]].of(key[1]) for key in problem.keys}) == problem.budget
    assert sum(widths.qk for widths in plan.layers) == 5 * 32 + 48
    assert sum(widths.vo for widths in plan.layers) == 4 * 32 + 2 * 48
    assert sum(widths.mlp for widths in plan.layers) == 3 * 512 + 3 * 640


@settings(max_examples=100)
@given(layer=LAYERS, n=st.integers(1, 40), percent=PERCENTS, align=st.sampled_from([8, 16, 32]))
def test_queries_and_values_are_narrowed_in_the_same_layers_but_one(layer, n, percent, align):
    alike = replace(layer, qk=layer.qk, pairs=layer.pairs, vo=layer.qk, mlp=layer.mlp)
    plan = planned(model_shape(*[alike] * n), CompressConfig(ratio=percent / 100, align=align, method="a3"))
    assert sum(widths.qk != widths.vo for widths in plan.layers) <= 1


def test_layers_that_lose_head_channels_keep_neurons_where_they_can():
    plan = plan_for(SMOLLM2, CompressConfig(ratio=0.125))
    assert {(widths.vo, widths.mlp) for widths in plan.layers} == {(48, 1408), (64, 1280)}


@settings(max_examples=60)
@given(layer=LAYERS, ratio=PERCENTS.map(lambda k: k / 100))
def test_exact_ranks_are_rounded_and_all_layers_alike(layer, ratio):
    shape, config = model_shape(layer, layer, layer), CompressConfig(ratio=ratio, align=None, method="a3")
    plan = planned(shape, config)
    assert len(set(plan.layers)) == 1
    for part in COMPONENTS:
        grid = grid_of(layer, part, align=None)
        assert abs(plan.layers[0].of(part) - (1 - ratio) * grid.width) <= grid.step - 0.5


@settings(max_examples=100)
@given(
    layer=LAYERS,
    n=st.integers(1, 12),
    percent=PERCENTS,
    goal=st.sampled_from(["target_params", "target_kv_bytes"]),
    align=st.sampled_from([8, 16, None]),
)
def test_a_target_is_never_exceeded_and_no_wider_step_fits(layer, n, percent, goal, align):
    shape = model_shape(*[layer] * n)
    dense = problem_for(shape, CompressConfig(**{goal: 1}))
    whole = dense.full + dense.fixed
    config = CompressConfig(**{goal: whole - dense.full * percent // 100}, align=align, method="a3")
    plan, problem = planned(shape, config), problem_for(shape, config)
    left = problem.budget - problem.cost({key: plan.layers[key[0]].of(key[1]) for key in problem.keys})
    assert left >= 0
    for key in problem.keys:
        grid, width = problem.grid(key), plan.layers[key[0]].of(key[1])
        wider = grid.up(width + 1)
        assert width == grid.width or problem.costs.of(*key, wider) - problem.costs.of(*key, width) > left


@pytest.mark.parametrize("percent", [12.5, 20, 25, 37.5, 50])
@pytest.mark.parametrize("shape", [SMOLLM2, STORIES])
def test_what_has_to_have_one_width_has_one_and_the_rest_makes_up_for_it(shape, percent):
    def removed(**settings) -> tuple[Plan, float]:
        config = CompressConfig(ratio=percent / 100, **settings)
        plan, problem = plan_for(shape, config), problem_for(shape, config)
        chosen = {key: plan.layers[key[0]].of(key[1]) for key in problem.keys}
        return plan, 100 * (1 - problem.cost(chosen) / problem.full)

    plan, share = removed(rope_scope="model")
    assert len({widths.qk for widths in plan.layers}) == 1
    assert percent - 1 < share <= percent  # one step of one layer is less than 1% of either model
    plan, share = removed(portable=True)
    assert len(set(plan.layers)) == 1
    assert plan.layers[0].qk == plan.layers[0].vo
    assert percent - 12 < share <= percent  # one step of all layers is up to 11.1%
