"""Figures of rows as SVG: throughput by compression, and gains over the dense model with their limits."""

from collections.abc import Mapping, Sequence
from typing import Any

from trisect.bench.rows import related
from trisect.support.plots import as_svg, colour_legend, file_name, need_matplotlib, one_plot

Row = Mapping[str, Any]
BAR = 0.8
"""Width of a group of bars."""
COLOURS = {"dense": "0.55", "owned": "0.75", "trisect": "C0", "svd-llm": "C1"}


def draw(rows: Sequence[Row]) -> dict[str, bytes]:
    """File name -> SVG: for every model and phase its throughput and its gains."""
    need_matplotlib()
    good = [row for row in related(rows) if "error" not in row]
    made: dict[str, bytes] = {}
    for subject, phase in dict.fromkeys((row["case"]["subject"], row["case"]["phase"]) for row in good):
        chosen = [row for row in good if (row["case"]["subject"], row["case"]["phase"]) == (subject, phase)]
        made[file_name("throughput", subject, phase)] = _throughput(chosen, f"{subject}, {phase}")
        cut = [row for row in chosen if row["case"]["asked"] and "against_dense" in row]
        if cut:
            made[file_name("gain", subject, phase)] = _gains(cut, f"{subject}, {phase}")
    return made


def _throughput(rows: Sequence[Row], title: str) -> bytes:
    """Tokens per second, a group of bars per setting."""
    figure, axes = one_plot()
    _bars(axes, rows, lambda row: row["tokens_per_second"])
    axes.set_ylabel("tokens/s")
    axes.set_title(title)
    return as_svg(figure)


def _gains(rows: Sequence[Row], title: str) -> bytes:
    """Speed-up over the dense model, with a dash at the limit of each."""
    figure, axes = one_plot()
    places = _bars(axes, rows, lambda row: row["against_dense"]["speedup"])
    for row, (left, right) in zip(rows, places, strict=True):
        axes.hlines(row["against_dense"]["limit"], left, right, colors="black", linewidth=1.2)
    axes.axhline(1.0, color="0.5", linestyle="--", linewidth=1)
    axes.set_ylabel("speed-up over dense (dash: its limit)")
    axes.set_title(title)
    return as_svg(figure)


def _bars(axes: Any, rows: Sequence[Row], height: Any) -> list[tuple[float, float]]:
    """Bars grouped by setting; gives back where each row's bar begins and ends."""
    groups = list(dict.fromkeys(map(_setting, rows)))
    members = {group: [row for row in rows if _setting(row) == group] for group in groups}
    places: dict[int, tuple[float, float]] = {}
    for at, group in enumerate(groups):
        width = BAR / len(members[group])
        for number, row in enumerate(members[group]):
            left = at - BAR / 2 + number * width
            case = row["case"]
            bar = axes.bar(left, height(row), width, align="edge", color=COLOURS[case["kind"]], linewidth=0.5)
            label = "dense" if not case["asked"] else f"{100 * row['removed']:.0f}%"
            axes.bar_label(bar, [label], fontsize=6, rotation=90, padding=2)
            places[id(row)] = (left, left + width)
    axes.set_xticks(range(len(groups)), groups, fontsize=7)
    axes.margins(y=0.15)
    kinds = dict.fromkeys(row["case"]["kind"] for row in rows)
    colour_legend(axes, {kind: COLOURS[kind] for kind in kinds}, fontsize=7)
    return [places[id(row)] for row in rows]


def _setting(row: Row) -> str:
    case = row["case"]
    new = f"+{case['new']}" if case["new"] else ""
    mode = "" if case["mode"] == "plain" else f"\n{case['mode']}"
    return f"{case['batch']} x {case['length']}{new}\n{case['attention']}{mode}"
