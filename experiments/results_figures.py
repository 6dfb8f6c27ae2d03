"""Figures of docs/results.md as SVG: the same receipts give the same bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

import a3plus_tables as a3plus
import machine_tables as machine
import own_words_tables as own_words
from tables import read

from trisect.compare.figures import MARKERS
from trisect.support.plots import STYLE, as_svg, file_name, one_plot

STAGE_COLOURS = {stage: f"C{number}" for number, stage in enumerate(machine.STAGES)}


def a3plus_pictures() -> dict[str, bytes]:
    """Increase in perplexity against what was removed, a figure for each of two texts."""
    return {file_name("a3plus", text): _increase(text) for text in (a3plus.WIKITEXT, a3plus.C4)}


def _increase(text: str) -> bytes:
    dense, rows = a3plus.a3plus_rows()
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["settings"]["method"] in ("a3", "a3+", "svd-llm"):
            point = 100 * row["removed"], row["perplexity"][text] - dense[text]
            lines.setdefault(a3plus.row_name(row), []).append(point)
    figure, axes = one_plot()
    for at, (name, points) in enumerate(lines.items()):
        axes.plot(*zip(*sorted(points), strict=True), marker=MARKERS[at], label=name)
    axes.set_yscale("log")
    axes.set_xlabel("removed from the decoder (%)")
    axes.set_ylabel("increase in perplexity")
    axes.set_title(f"SmolLM2-135M, {text}")
    axes.legend(frameon=False)
    return as_svg(figure)


def own_words_pictures() -> dict[str, bytes]:
    """What each way of calibrating costs a3+ on each text, a figure per allocation."""
    names = ("a3+ uniform", "a3+ balanced")
    return {file_name("own-words", name): _calibrated(name) for name in names if own_words.featured(name)}


def _calibrated(name: str) -> bytes:
    bars = own_words.featured(name)
    texts = list(next(iter(bars.values())))
    width = 0.8 / len(bars)
    figure, axes = one_plot()
    for at, (calibrated, rises) in enumerate(bars.items()):
        places = [place + (at - (len(bars) - 1) / 2) * width for place in range(len(texts))]
        axes.bar(places, [rises[text] for text in texts], width, label=calibrated)
    axes.set_xticks(range(len(texts)), texts)
    axes.set_ylabel("increase in perplexity")
    axes.set_title(f"SmolLM2-135M, {name}, {own_words.FEATURED:.0%} removed")
    axes.legend(frameon=False, title="calibrated on")
    return as_svg(figure)


def ranks_pictures() -> dict[str, bytes]:
    """Where the time goes with one, two and four processes."""
    return {"ranks.svg": _stacked(machine.time_rows(), "seconds; method, number of processes")}


def shapes_pictures() -> dict[str, bytes]:
    """Where the time goes at true shapes, for one layer."""
    rows = [
        (
            f"{entry['shape']}, {entry['method']}",
            {stage: s / entry["layers"] for stage, s in entry["receipt"]["timings"].items()},
        )
        for entry in machine.shapes()
    ]
    return {"scale-shapes.svg": _stacked(rows, "seconds a layer")}


def _stacked(rows: Sequence[tuple[str, Mapping[str, Any]]], label: str) -> bytes:
    figure, axes = one_plot()
    figure.subplots_adjust(left=0.28, top=0.86)
    ends = [0.0] * len(rows)
    for stage in machine.STAGES:
        widths = [float(seconds.get(stage, 0.0)) for _, seconds in rows]
        if any(widths):
            axes.barh(range(len(rows)), widths, left=ends, color=STAGE_COLOURS[stage], label=stage)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.legend(frameon=False, fontsize=7, ncols=5, loc="lower center", bbox_to_anchor=(0.4, 1.0))
    return as_svg(figure)


def growth_pictures() -> dict[str, bytes]:
    """Seconds and memory against each size, relative to the smallest, with the fitted powers."""
    figure, axes = _two_plots()
    styles = {"a3": "-", "a3+": "--"}
    for at, (size, methods) in enumerate(read(machine.GROWTH)["growth"].items()):
        for method, entry in methods.items():
            first = entry["rows"][0]
            for plot, key, word in zip(axes, ("seconds", "peak_bytes"), ("seconds", "memory"), strict=True):
                points = [(r["value"] / first["value"], r[key] / first[key]) for r in entry["rows"]]
                label = f"{size}, {method}: {entry['exponents'][word]:.2f}"
                plot.plot(*zip(*points, strict=True), styles[method], color=f"C{at}", marker="o", label=label)
    for plot, word in zip(axes, ("seconds", "peak memory"), strict=True):
        plot.set_xscale("log", base=2)
        plot.set_yscale("log", base=2)
        plot.set_xlabel("size, times the smallest")
        plot.set_title(f"{word}, times that of the smallest")
        plot.legend(frameon=False, fontsize=6)
    return {"cost-growth.svg": as_svg(figure)}


def _two_plots() -> tuple[Any, Any]:
    """A figure with two pairs of axes, side by side."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(10.4, 3.6))
        figure.subplots_adjust(left=0.06, right=0.985, bottom=0.13, top=0.92, wspace=0.14)
        axes = figure.subplots(1, 2)
    return figure, axes
