"""Figures show the numbers of their runs, at the places that the axes say."""

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import HOSTILE, perplexity_entry

from trisect.plan.budget import budget_of
from trisect.plan.curves import Curves
from trisect.records.shapes import LinearShape
from trisect.report.collect import read_runs
from trisect.report.drawing import Bars, Chart, Figure, HeatMap, Point, Series
from trisect.report.facts import with_facts
from trisect.report.figures import loss_map, plan_map, time_bars, trial_chart, tuning_chart
from trisect.report.png import png
from trisect.report.records import Run
from trisect.report.relations import curve_charts, fits, pareto_charts, predicted_rise, prediction_chart
from trisect.report.svg import svg

NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def run(real_run: Path) -> Run:
    return read_runs([real_run])[0]


def curves_of(run: Run) -> Curves:
    """Curves that cost 0.01 nats per channel that goes, ten times that below half."""
    points: dict[tuple[int, str], dict[int, float]] = {}
    for index, layer in enumerate(run.before.layers):
        for component in ("qk", "ov", "mlp"):
            full = layer.width(component)
            points[index, component] = {full: 0.0, full // 2: 0.01 * (full - full // 2)}
    return Curves(points=points, fingerprint="f", token_hash="t", method=run.method)


def test_the_plan_shows_every_width(run: Run) -> None:
    heat = plan_map(run)
    assert heat.rows == ("QK", "OV", "MLP")
    for row, component in zip(heat.cells, ("qk", "ov", "mlp"), strict=True):
        for cell, old, new in zip(row, run.before.layers, run.after.layers, strict=True):
            assert cell is not None
            assert cell.value == new.width(component) / old.width(component)
            assert f"width {old.width(component)} to {new.width(component)}" in cell.tip


def test_factored_maps_are_shown_by_the_parameters_they_keep(run: Run) -> None:
    first, *others = run.before.layers
    factored = replace(first, linears=(LinearShape(name="up", rank=4), LinearShape(name="down", rank=4)))
    heat = plan_map(replace(run, after=replace(run.before, layers=(factored, *others))))
    cell = heat.cells[2][0]
    assert cell is not None
    kept = first.d_model * first.mlp + 2 * 4 * (first.d_model + first.mlp)
    assert cell.value == pytest.approx(kept / (3 * first.d_model * first.mlp))
    assert cell.tip.endswith("of its parameters kept")
    assert "parameters" in heat.caption


def test_the_loss_map_shows_the_shares_of_the_receipt(run: Run) -> None:
    heat = loss_map(run)
    assert heat is not None
    shown = {
        (layer, name.lower()): cell.value
        for name, row in zip(heat.rows, heat.cells, strict=True)
        for layer, cell in enumerate(row)
        if cell is not None
    }
    entries = run.receipts[0]["losses"]
    assert shown == {(e["layer"], e["component"]): e["loss"] / e["total"] for e in entries}
    assert heat.warmth(max(shown.values())) == 1


def test_a_part_that_was_not_touched_has_no_cell(run: Run) -> None:
    some = tuple(replace(loss, total=0.0) if loss.layer == 1 else loss for loss in run.losses)
    heat = loss_map(replace(run, losses=some))
    assert heat is not None
    assert [row[1] for row in heat.cells] == [None] * 3
    assert loss_map(replace(run, losses=())) is None


def test_bars_are_the_timings_of_the_receipt_without_their_sum(run: Run) -> None:
    bars = time_bars([run])
    assert bars is not None
    timings = dict(run.receipts[0]["timings"])
    total = timings.pop("compress")
    assert bars.rows == ((run.name, timings),)
    assert sum(bars.rows[0][1].values()) == pytest.approx(total, abs=0.01)
    assert time_bars([replace(run, timings={})]) is None


def test_curves_carry_the_widths_that_were_chosen(run: Run) -> None:
    curves = curves_of(run)
    charts = curve_charts(curves, [run])
    assert [chart.name for chart in charts] == ["curves-qk", "curves-ov", "curves-mlp"]
    for chart, component in zip(charts, ("qk", "ov", "mlp"), strict=True):
        *layers, chosen = chart.series
        assert [series.depth for series in layers] == [0.0, 0.5, 1.0]
        assert chosen.label == run.name
        for point, old, new in zip(chosen.points, run.before.layers, run.after.layers, strict=True):
            gone = old.width(component) - new.width(component)
            assert point.x == pytest.approx(100 * new.width(component) / old.width(component))
            assert point.y == pytest.approx(0.01 * gone)


def test_the_prediction_is_the_sum_over_components_and_the_measurement_a_logarithm(run: Run) -> None:
    curves = curves_of(run)
    gone = sum(
        old.width(part) - new.width(part)
        for old, new in zip(run.before.layers, run.after.layers, strict=True)
        for part in ("qk", "ov", "mlp")
    )
    assert predicted_rise(curves, run) == pytest.approx(0.01 * gone)
    chart = prediction_chart(curves, [run])
    assert chart is not None
    point = chart.series[0].points[0]
    assert (point.x, point.y) == (pytest.approx(0.01 * gone), pytest.approx(math.log(25 / 20)))


def test_nothing_is_predicted_where_curves_end_or_where_more_was_done_than_narrowing(run: Run) -> None:
    curves = curves_of(run)
    shallow = replace(curves, points={key: dict(list(p.items())[:1]) for key, p in curves.points.items()})
    assert predicted_rise(shallow, run) is None
    assert predicted_rise(replace(curves, points={(0, "qk"): curves.points[0, "qk"]}), run) is None
    tuned = replace(run, receipts=({**run.receipts[0], "tuning": [{"losses": [1.0]}]},))
    assert predicted_rise(curves, tuned) is None
    assert predicted_rise(replace(curves, method="a3+"), run) is None
    other = replace(curves, points={(0, "qk"): {17: 0.0}})
    assert not fits(other, run)
    assert not fits(replace(curves, points={(99, "qk"): {16: 0.0}}), run)
    assert not fits(replace(curves, points={(0, "strange"): {16: 0.0}}), run)


def test_pareto_points_are_sizes_and_perplexities_and_the_front_is_what_nothing_beats(
    copied: Callable[..., Path],
) -> None:
    def measured(value: float) -> dict[str, Any]:
        return {"before": perplexity_entry(20.0), "after": perplexity_entry(value)}

    names = {"good": 24.0, "bad": 30.0}
    runs = read_runs([copied(name, perplexity=measured(value)) for name, value in names.items()])
    charts = pareto_charts(runs)
    assert [chart.x_label for chart in charts] == ["parameters (millions)", "bits per dense parameter"]
    dense, good, bad, front = charts[0].series
    parameters = budget_of(runs[0].after).parameters / 1e6
    assert [(point.x, point.y) for point in good.points + bad.points] == [
        (parameters, 24.0),
        (parameters, 30.0),
    ]
    assert dense.points[0].y == 20.0
    assert front.points == (*good.points, *dense.points)
    bits = charts[1].series[0].points[0]
    assert bits.x == 32
    assert pareto_charts(runs[:1]) == []


def test_a_few_bytes_put_nothing_on_the_front(copied: Callable[..., Path]) -> None:
    def measured(value: float) -> dict[str, Any]:
        return {"before": perplexity_entry(20.0), "after": perplexity_entry(value)}

    good, bad = read_runs([copied(name, perplexity=measured(v)) for name, v in (("good", 24), ("bad", 30))])
    for smaller, kept in ((1, {"good"}), (bad.weight_bytes // 10, {"good", "bad"})):
        less = with_facts(replace(bad, weight_bytes=bad.weight_bytes - smaller), [])
        sizes = {fact.quantity: fact for fact in less.facts}
        facts = tuple(sizes.get(fact.quantity, fact) for fact in bad.facts)
        *points, front = pareto_charts([good, replace(bad, facts=facts)])[1].series
        named = {point: series.label for series in points for point in series.points}
        assert {named[point] for point in front.points} - {"dense (dense)"} == kept


def test_runs_on_different_texts_share_no_pareto_plot(copied: Callable[..., Path]) -> None:
    other = {
        "before": perplexity_entry(9.0, token_hash="b" * 64),
        "after": perplexity_entry(9, token_hash="b" * 64),
    }
    assert pareto_charts(read_runs([copied("one"), copied("two", perplexity=other)])) == []


def test_an_infinite_perplexity_is_in_no_plot(copied: Callable[..., Path]) -> None:
    broken = {"before": perplexity_entry(20.0), "after": perplexity_entry(None)}
    runs = read_runs([copied("one"), copied("two", perplexity=broken)])
    assert math.isinf(next(fact.after for fact in runs[1].facts if fact.quantity.kind == "perplexity"))
    assert pareto_charts(runs) == []
    assert prediction_chart(curves_of(runs[1]), runs[1:]) is None


def test_trials_and_tuning_are_shown_as_they_were(copied: Callable[..., Path]) -> None:
    trials = [{"ratio": 0.2, "rise": 0.01, "inside": True}, {"ratio": 0.4, "rise": 0.2, "inside": False}]
    folder = copied("searched", target={"trials": trials}, tuning=[{"losses": [2.0, 1.5]}])
    run = read_runs([folder])[0]
    trial, tuning = trial_chart(run), tuning_chart(run)
    assert trial is not None
    assert tuning is not None
    assert [[(p.x, p.y) for p in series.points] for series in trial.series] == [[(20, 0.01)], [(40, 0.2)]]
    assert [(p.x, p.y) for p in tuning.series[0].points] == [(1, 2.0), (2, 1.5)]


EXAMPLES: list[Figure] = [
    Chart(
        name="chart",
        title=HOSTILE,
        caption=HOSTILE,
        x_label="x $1$",
        y_label="y",
        series=(
            Series(label=f"_{HOSTILE}", points=(Point(x=0, y=1, tip=HOSTILE), Point(x=10, y=3, tip="$"))),
            Series(label="deep", depth=1.0, points=(Point(x=5, y=2, tip="b"),)),
        ),
    ),
    HeatMap(name="heat", title="$a_b", rows=(HOSTILE,), cells=((None,),), unit="u", coldest=0, hottest=0),
    Bars(
        name="bars",
        title="t",
        unit="seconds",
        rows=((HOSTILE, {"$a": 3.0, "b": 1.0}), ("short", {"b": 0.5})),
        names=("$a", "b"),
    ),
]


@pytest.mark.parametrize("figure", EXAMPLES, ids=lambda figure: figure.name)
def test_a_figure_is_xml_without_scripts_whatever_its_names(figure: Figure) -> None:
    drawn = svg(figure)
    assert drawn == svg(figure)
    root = ET.fromstring(drawn)
    names = {element.tag.removeprefix(NAMESPACE) for element in root.iter()}
    assert names <= {"svg", "g", "rect", "path", "text", "title"}
    attributes = {name for element in root.iter() for name in element.attrib}
    assert not {name for name in attributes if name.startswith("on") or "href" in name}


@pytest.mark.parametrize("figure", EXAMPLES, ids=lambda figure: figure.name)
def test_a_picture_is_a_png_and_always_the_same(figure: Figure) -> None:
    pytest.importorskip("matplotlib")
    drawn = png(figure)
    assert drawn.startswith(b"\x89PNG\r\n\x1a\n")
    assert drawn == png(figure)


def test_marks_lie_where_their_values_are() -> None:
    """Equal steps in the data are equal steps on the paper, and up is more."""
    root = ET.fromstring(svg(EXAMPLES[0]))
    places = {}
    for path in root.iter(f"{NAMESPACE}path"):
        title = path.find(f"{NAMESPACE}title")
        if title is not None and title.text is not None:
            found = re.match(r"translate\(([\d.]+),([\d.]+)\)", path.attrib["transform"])
            assert found is not None
            places[title.text] = tuple(map(float, found.groups()))
    first, middle, last = places[HOSTILE], places["b"], places["$"]
    assert middle[0] == pytest.approx((first[0] + last[0]) / 2, abs=0.2)
    assert middle[1] == pytest.approx((first[1] + last[1]) / 2, abs=0.2)
    assert last[0] > first[0]
    assert last[1] < first[1]


def test_segments_are_as_long_as_their_values_and_every_bar_is_a_whole() -> None:
    root = ET.fromstring(svg(EXAMPLES[2]))
    wide = [
        float(rect.attrib["width"])
        for rect in root.iter(f"{NAMESPACE}rect")
        if "mark" in rect.attrib.get("class", "")
    ]
    assert wide[0] == pytest.approx(3 * wide[1], rel=0.01)
    assert wide[2] == pytest.approx(wide[0] + wide[1], rel=0.01)
