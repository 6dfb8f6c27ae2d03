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
from trisect.records.shapes import LinearShape
from trisect.report.charts import loss_map, pareto_charts, plan_map, time_bars, trial_chart, tuning_chart
from trisect.report.page import Section, write_figures
from trisect.report.runs import Run, read_runs
from trisect.support.plots import COLOURS, Chart, Figure, Groups, HeatMap, Series, file_name, png, svg

NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def run(real_run: Path) -> Run:
    return read_runs([real_run])[0]


def with_losses(run: Run, losses: list[Any]) -> Run:
    return replace(run, receipts=(run.receipts[0].model_copy(update={"losses": losses}),))


def test_the_plan_shows_every_width(run: Run) -> None:
    heat = plan_map(run.before, run.after)
    assert list(heat.rows) == ["QK", "OV", "MLP"]
    for row, component in zip(heat.rows.values(), ("qk", "ov", "mlp"), strict=True):
        for share, old, new in zip(row, run.before.layers, run.after.layers, strict=True):
            assert share == new.width(component) / old.width(component)
            note = f"width {old.width(component)} to {new.width(component)}"
            assert (component.upper(), share, note) in {entry[1:] for entry in heat.table()[1]}


def test_factored_maps_are_shown_by_the_parameters_they_keep(run: Run) -> None:
    first, *others = run.before.layers
    factored = replace(first, linears=(LinearShape(name="up", rank=4), LinearShape(name="down", rank=4)))
    heat = plan_map(run.before, replace(run.before, layers=(factored, *others)))
    kept = first.d_model * first.mlp + 2 * 4 * (first.d_model + first.mlp)
    assert heat.rows["MLP"][0] == pytest.approx(kept / (3 * first.d_model * first.mlp))
    assert "parameters" in heat.unit
    assert "parameters" in heat.caption


def test_the_loss_map_shows_the_shares_of_the_receipt(run: Run) -> None:
    (heat,) = loss_map(run)
    assert heat is not None
    shown = {
        (layer, name.lower()): share
        for name, row in heat.rows.items()
        for layer, share in enumerate(row)
        if share is not None
    }
    entries = run.receipts[0].whole["losses"]
    assert shown == {(e["layer"], e["component"]): e["loss"] / e["total"] for e in entries}
    assert heat.hottest == max(shown.values())


def test_a_part_that_was_not_touched_has_no_cell(run: Run) -> None:
    losses = run.compression.losses
    some = [loss.model_copy(update={"total": 0.0}) if loss.layer == 1 else loss for loss in losses]
    (heat,) = loss_map(with_losses(run, some))
    assert heat is not None
    assert [row[1] for row in heat.rows.values()] == [None] * 3
    assert loss_map(with_losses(run, [])) == []


def test_bars_are_the_timings_of_the_receipt_without_their_sum(run: Run) -> None:
    (bars,) = time_bars([run])
    assert bars is not None
    timings = dict(run.receipts[0].whole["timings"])
    total = timings.pop("compress")
    assert bars.groups[run.name] == timings
    assert sum(bars.groups[run.name].values()) == pytest.approx(total, abs=0.01)
    silent = run.receipts[0].model_copy(update={"timings": {}})
    assert time_bars([replace(run, receipts=(silent,))]) == []


def test_pareto_points_are_sizes_and_perplexities_and_the_front_is_what_nothing_beats(
    copied: Callable[..., Path],
) -> None:
    def measured(value: float) -> dict[str, Any]:
        return {"before": perplexity_entry(20.0), "after": perplexity_entry(value)}

    names = {"good": 24.0, "bad": 30.0}
    runs = read_runs([copied(name, perplexity=measured(value)) for name, value in names.items()])
    charts = pareto_charts(runs)
    assert [chart.axes[0] for chart in charts] == ["parameters (millions)", "bits per dense parameter"]
    dense, good, bad, front = charts[0].series
    parameters = budget_of(runs[0].after).parameters / 1e6
    assert [*good.points, *bad.points] == [(parameters, 24.0), (parameters, 30.0)]
    assert dense.points[0][1] == 20.0
    assert front.points == [*good.points, *dense.points]
    assert charts[1].series[0].points[0][0] == 32
    assert pareto_charts(runs[:1]) == []


def test_a_few_bytes_put_nothing_on_the_front(copied: Callable[..., Path]) -> None:
    def measured(value: float) -> dict[str, Any]:
        return {"before": perplexity_entry(20.0), "after": perplexity_entry(value)}

    good, bad = read_runs([copied(name, perplexity=measured(v)) for name, v in (("good", 24), ("bad", 30))])
    for smaller, kept in ((1, {"good"}), (bad.weight_bytes // 10, {"good", "bad"})):
        less = replace(bad, weight_bytes=bad.weight_bytes - smaller).with_facts([])
        sizes = {fact.quantity: fact for fact in less.facts}
        facts = tuple(sizes.get(fact.quantity, fact) for fact in bad.facts)
        *points, front = pareto_charts([good, replace(bad, facts=facts)])[1].series
        named = {point: series.label for series in points for point in series.points}
        assert {named[point] for point in front.points} - {"dense (dense)"} == kept


def test_runs_on_different_texts_share_no_pareto_plot(copied: Callable[..., Path]) -> None:
    other = {"before": perplexity_entry(9.0, token_hash="b" * 64), "after": perplexity_entry(9, token_hash="b" * 64)}
    assert pareto_charts(read_runs([copied("one"), copied("two", perplexity=other)])) == []


def test_an_infinite_perplexity_is_in_no_plot(copied: Callable[..., Path]) -> None:
    broken = {"before": perplexity_entry(20.0), "after": perplexity_entry(None)}
    runs = read_runs([copied("one"), copied("two", perplexity=broken)])
    assert math.isinf(next(fact.after for fact in runs[1].facts if fact.quantity.kind == "perplexity"))
    assert pareto_charts(runs) == []


def test_trials_and_tuning_are_shown_as_they_were(copied: Callable[..., Path]) -> None:
    trials = [{"ratio": 0.2, "rise": 0.01, "inside": True}, {"ratio": 0.4, "rise": 0.2, "inside": False}]
    folder = copied("searched", target={"trials": trials}, tuning=[{"losses": [2.0, 1.5]}])
    run = read_runs([folder])[0]
    (trial,), (tuning,) = trial_chart(run), tuning_chart(run)
    assert trial is not None
    assert tuning is not None
    assert {each.label: each.points for each in trial.series} == {
        "inside the bound": [(20, 0.01)],
        "outside": [(40, 0.2)],
    }
    assert tuning.series[0].points == [(1, 2.0), (2, 1.5)]


EXAMPLES: list[Figure] = [
    Chart(
        name="chart",
        title=HOSTILE,
        caption=HOSTILE,
        axes=("x $1$", "y \x00"),
        series=[
            Series(label=f"_{HOSTILE}\x1b", points=[(0, 1), (5, 2), (10, 3)]),
            Series(label="deep", points=[(5, 2)]),
        ],
    ),
    HeatMap(name="heat", title="$a_b", rows={HOSTILE: [None, 0.5]}, unit="u", coldest=0, hottest=0),
    Groups(
        name="groups", title="\u6f22", y_label="y \x00", groups={HOSTILE: {"a": 1.0, "_$b": 2.0}, "other": {"a": 4.0}}
    ),
]
each_example = pytest.mark.parametrize("figure", EXAMPLES, ids=lambda figure: figure.name)


@pytest.fixture(autouse=True)
def _matplotlib() -> None:
    pytest.importorskip("matplotlib")


@each_example
def test_a_figure_is_xml_without_scripts_whatever_its_names(figure: Figure) -> None:
    drawn = svg(figure)
    assert drawn == svg(figure)
    root = ET.fromstring(drawn)
    names = {element.tag.removeprefix(NAMESPACE) for element in root.iter()}
    assert names <= {"svg", "g", "defs", "use", "path", "text", "clipPath", "rect"}
    attributes = [entry for element in root.iter() for entry in element.attrib.items()]
    assert not [name for name, _ in attributes if name.startswith("on")]
    assert all(value.startswith("#") for name, value in attributes if name.endswith("href"))
    assert not [element for element in root.iter(f"{NAMESPACE}g") if "id" in element.attrib]
    assert "var(--" not in drawn
    assert "var(--ink)" in svg(figure, themed=True)


@each_example
def test_a_picture_is_a_png_and_always_the_same(figure: Figure) -> None:
    drawn = png(figure)
    assert drawn.startswith(b"\x89PNG\r\n\x1a\n")
    assert drawn == png(figure)


def marks(chart: Chart, colour: str = COLOURS[0]) -> list[tuple[float, float]]:
    """Where the marks of a colour lie; the last one is in the legend."""
    found = [
        mark for mark in ET.fromstring(svg(chart)).iter(f"{NAMESPACE}use") if f"fill: {colour}" in mark.attrib["style"]
    ]
    return [(float(mark.attrib["x"]), float(mark.attrib["y"])) for mark in found[:-1]]


def test_marks_lie_where_their_values_are() -> None:
    """Equal steps in the data are equal steps on the paper, and up is more."""
    chart = EXAMPLES[0]
    assert isinstance(chart, Chart)
    (first, middle, last), (deep,) = marks(chart), marks(chart, COLOURS[1])
    assert middle == pytest.approx(((first[0] + last[0]) / 2, (first[1] + last[1]) / 2), abs=0.01)
    assert deep == pytest.approx(middle, abs=0.01)
    assert last[0] > first[0]
    assert last[1] < first[1]


def test_every_figure_has_its_numbers_as_a_table() -> None:
    tables = [figure.table()[1] for figure in EXAMPLES]  # type: ignore[attr-defined]
    assert tables[0][0] == (f"_{HOSTILE}\x1b", 0, 1)
    assert tables[1] == [(1, HOSTILE, 0.5, "")]
    assert tables[2] == [(HOSTILE, "a", 1.0), (HOSTILE, "_$b", 2.0), ("other", "a", 4.0)]


def test_upright_bars_are_as_tall_as_their_values() -> None:
    paths = [path.attrib for path in ET.fromstring(svg(EXAMPLES[2])).iter(f"{NAMESPACE}path")]
    tall = []
    for path in paths:
        heights = [float(place) for place in re.findall(r"[ML] [\d.]+ ([\d.]+)", path["d"])]
        if any(f"fill: {colour}" in path.get("style", "") for colour in COLOURS[:2]):
            tall.append(max(heights) - min(heights))
    assert tall[:3] == pytest.approx([tall[0], 2 * tall[0], 4 * tall[0]], rel=0.01)


@pytest.mark.parametrize(("highest", "log"), [(15.0, False), (100.0, True), (1e9, True)])
def test_an_axis_is_logarithmic_where_its_values_need_it(highest: float, log: bool) -> None:
    points = [(0.0, 1.0), (1.0, highest**0.5), (2.0, highest)]
    chart = Chart(name="c", title="", axes=("", ""), series=[Series(label="a", points=points)], log_y=True)
    first, middle, last = (y for _, y in marks(chart))
    assert (abs(middle - (first + last) / 2) < 0.01) == log


def test_a_long_line_has_a_few_marks_and_a_very_long_one_none() -> None:
    for length, number in ((10, 10), (64, 16), (1000, 0)):
        series = [Series(label="a", points=[(n, n) for n in range(length)])]
        assert len(marks(Chart(name="c", title="", axes=("", ""), series=series))) == number


def test_figures_of_runs_with_strange_names_have_plain_file_names_none_twice(tmp_path: Path) -> None:
    names = ["plan-a/b", "plan-a b", "PLAN-A-B", "../..", "plan-" + 300 * "x"]
    section = Section("", figures=[replace(EXAMPLES[2], name=name) for name in names])
    written = write_figures(tmp_path, {"time": section})
    assert len(set(written)) == 2 * len(names)
    assert {path.parent for path in written} == {tmp_path}


def test_names_of_files_hold_what_every_system_can_write() -> None:
    assert file_name("A b/c-d+e.1") == "a-b-c-d+e.1.svg"
