"""Figures show the numbers of their runs, at the places that the axes say."""

import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import HOSTILE

from trisect.records.shapes import LinearShape
from trisect.report.charts import loss_map, plan_map, tuning_chart
from trisect.report.runs import Run, read_runs
from trisect.support.plots import COLOURS, Chart, Figure, HeatMap, Series, file_name, svg

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


def test_tuning_is_shown_as_it_was(copied: Callable[..., Path]) -> None:
    run = read_runs([copied("tuned", tuning=[{"losses": [2.0, 1.5]}])])[0]
    (tuning,) = tuning_chart(run)
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


def test_names_of_files_hold_what_every_system_can_write() -> None:
    assert file_name("A b/c-d+e.1") == "a-b-c-d+e.1.svg"
