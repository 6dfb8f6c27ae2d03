"""Spectra on the page are those of the receipt, at their ranks, with a line at the width that was kept."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from trisect.errors import TrisectError
from trisect.records.parts import even_ranks
from trisect.report.charts import across, spectrum_charts
from trisect.report.page import render, report_sections
from trisect.report.runs import Run, read_runs
from trisect.support.plots import Series
from trisect.support.receipt import Loss, Receipt, Spectrum


@pytest.fixture(scope="module")
def run(real_run: Path) -> Run:
    return read_runs([real_run])[0]


def loss_of(
    layer: int, *, width: int = 3, share: float = 0.1, values: tuple[float, ...] = (0.5, 0.25, 0.15, 0.1)
) -> Loss:
    spectrum = Spectrum(of="rotation pairs", length=len(values), values=list(values))
    return Loss(layer=layer, component="qk", width=width, loss=share, total=1.0, note="", spectrum=spectrum)


def split(series: Sequence[Series]) -> tuple[list[Series], list[Series]]:
    return [one for one in series if not one.guide], [one for one in series if one.guide]


def test_lines_are_the_receipts_numbers_and_the_guide_stands_at_the_width(run: Run) -> None:
    charts = spectrum_charts(run)
    assert [chart.name for chart in charts] == [f"spectra-{part}-run" for part in ("qk", "ov", "mlp")]
    for chart, component in zip(charts, ("qk", "ov", "mlp"), strict=True):
        entries = [entry for entry in run.receipts[0].whole["losses"] if entry["component"] == component]
        lines, guides = split(chart.series)
        assert [line.label for line in lines] == ["layer 0", "layer 1", "layer 2"]
        for line, entry in zip(lines, entries, strict=True):
            found = entry["spectrum"]
            assert [y for _, y in line.points] == [100 * share for share in found["values"]]
            full = run.before.layers[0].width(component)
            kept = sum(x < 100 * entry["width"] / full for x, _ in line.points)
            if full <= 64:  # every channel has a point of its own
                assert kept == entry["width"]
        widths = {100 * entry["width"] / entry["spectrum"]["length"] for entry in entries}
        assert {x for guide in guides for x, _ in guide.points} == widths


def test_ranks_of_a_long_spectrum_span_it() -> None:
    spectrum = Spectrum(of="neuron scores", length=1001, values=[0.5, 0.01, 0.001])
    loss = Loss(layer=0, component="mlp", width=700, loss=0.1, total=1.0, note="", spectrum=spectrum)
    assert even_ranks(spectrum.length, len(spectrum.values)) == [0, 500, 1000]
    run = run_of(loss)
    lines, guides = split(spectrum_charts(run)[0].series)
    assert [x for x, _ in lines[0].points] == [100 * (rank + 0.5) / 1001 for rank in (0, 500, 1000)]
    assert guides[0].label == "kept: 700 of 1001 (69.9%)"


def run_of(*losses: Loss) -> Run:
    """A run of which nothing but its losses is known."""
    nothing: Any = dict.fromkeys(("folder", "source", "before", "after"))
    receipt = Receipt(losses=list(losses), whole={})
    return Run(name="run", method="a3", weight_bytes=0, receipts=(receipt,), **nothing)


def test_layers_are_chosen_across_the_depth_with_the_one_that_lost_most() -> None:
    losses = [loss_of(layer, share=0.9 if layer == 11 else 0.1) for layer in range(30)]
    assert across(losses) == {0, 7, 11, 14, 22, 29}
    assert across(losses[:2]) == {0, 1}


def test_layers_of_different_widths_have_a_guide_each() -> None:
    run = run_of(*(loss_of(0, width=3), loss_of(1, width=2), loss_of(2, width=3)))
    guides = split(spectrum_charts(run)[0].series)[1]
    assert [guide.label for guide in guides] == ["kept: 3 of 4 (75.0%), layer 0 2", "kept: 2 of 4 (50.0%), layer 1"]


def test_what_rounding_left_is_not_drawn() -> None:
    run = run_of(*(loss_of(0, values=(0.9, 0.1, 1e-12, 0.0)),))
    chart = spectrum_charts(run)[0]
    assert [y for _, y in chart.series[0].points] == [90.0, 10.0]
    assert chart.log_y


def test_receipts_without_spectra_have_a_page_without_that_section(copied: Callable[..., Path]) -> None:
    folder = copied("old")
    runs = read_runs([folder])
    assert ">Spectra<" in render(runs, report_sections(runs))
    path = folder / "receipt.json"
    receipt = json.loads(path.read_text())
    for entry in receipt["losses"]:
        del entry["spectrum"]
    path.write_text(json.dumps(receipt))
    runs = read_runs([folder])
    assert spectrum_charts(runs[0]) == []
    assert ">Spectra<" not in render(runs, report_sections(runs))


@pytest.mark.parametrize(
    "spectrum",
    [
        "long",
        {"of": "x", "length": 2, "values": [0.5, 0.4, 0.1]},
        {"of": "x", "length": 4, "values": []},
        {"of": "x", "length": 4, "values": [0.1, 0.9]},
        {"of": "x", "length": 4, "values": [2.0, 0.9]},
        {"of": "x", "length": 4, "values": [0.5, -0.1]},
        {"of": "x", "length": 4, "values": [0.5, "0.1"]},
        {"of": 7, "length": 4, "values": [0.5]},
        {"of": "x", "length": -1, "values": [0.5]},
        {"of": "x", "length": 10**6, "values": [1e-6] * 5000},
    ],
)
def test_what_is_no_spectrum_is_refused(copied: Callable[..., Path], spectrum: Any) -> None:
    entry = {"layer": 0, "component": "qk", "width": 4, "loss": 0.1, "total": 1.0, "note": ""}
    folder = copied("bad", losses=[{**entry, "spectrum": spectrum}])
    with pytest.raises(TrisectError, match="spectrum"):
        read_runs([folder])


def test_a_silent_spectrum_is_nothing_to_draw(copied: Callable[..., Path]) -> None:
    entry = {"layer": 0, "component": "qk", "width": 4, "loss": 0.0, "total": 1.0, "note": ""}
    spectrum = {"of": "x", "length": 2, "values": [0.0, 0.0]}
    run = read_runs([copied("silent", losses=[{**entry, "spectrum": spectrum}])])[0]
    assert spectrum_charts(run) == []
    assert spectrum_charts(run_of()) == []
