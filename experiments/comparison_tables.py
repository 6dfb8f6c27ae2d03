"""Tables and figures of `trisect compare`: one section per recipe, from the rows that collect.py wrote."""

from collections.abc import Sequence
from functools import partial

from figures import Plot
from tables import Entry, read, rows_of, sourced, table

RECIPES = (
    *("main-smollm2", "main-stories15m", "main-stories-mpt", "why-stories-mpt", "svd-llm-core"),
    *("kv-stories-mpt", "ablation-qk", "ablation-ov", "ablation-mlp", "diagnostic"),
    *("calibration-study", "synthetic-stories", "pieces"),
)
LINES = {"main-smollm2": "C4", "main-stories15m": None, "main-stories-mpt": None, "kv-stories-mpt": None}
"""Recipes with a figure, and the text that it is about (None: the first)."""
NEAR = 0.005
"""A share removed that is further than this from its ratio is named in the cell."""
BROKEN = 20
"""Methods that are at once this many times worse than the dense model are in tables only."""


def comparisons() -> str:
    """Every recipe that was run."""
    return "\n\n".join(section(name) for name in RECIPES)


def section(name: str) -> str:
    """Title, what it is about, and a table per model."""
    file = read(f"{name}.json")
    pieces = [f"## {file['title']}", " ".join(filter(None, (file["about"], file["note"])))]
    for model, note in file["models"].items():
        rows = [row for row in file["rows"] if row["model"] == model]
        if len(rows) > 1:
            pieces += [f"**{model}**" + (f": {note}." if note else ""), comparison_table(rows)]
            if name == "diagnostic":
                pieces.append(diagnostic_table(rows))
    if name in LINES:
        pieces.append(f"![{name}](pictures/results/{name}.svg)")
    return sourced("\n\n".join(pieces), file["rows"], file["command"])


def recipe_table(name: str) -> str:
    """The table of a recipe with one model."""
    file = read(f"{name}.json")
    return sourced(comparison_table(file["rows"]), file["rows"], file["command"])


def comparison_table(rows: Sequence[Entry]) -> str:
    """Methods down, ratios and texts across; the best of those that cut the same parts in bold."""
    dense = next(row for row in rows if row["method"] == "dense")
    texts = list(dense["perplexity"])
    columns = [(ratio, text) for ratio in sorted({r["ratio"] for r in rows if r is not dense}) for text in texts]
    cells = {(row["method"], row["ratio"]): row for row in rows if row is not dense}
    best = {
        (tuple(row["parts"]), ratio, text): min(
            other["perplexity"][text]
            for other in cells.values()
            if other["parts"] == row["parts"] and other["ratio"] == ratio
        )
        for row in cells.values()
        for ratio, text in columns
        if row["ratio"] == ratio
    }
    lines = [["dense", *(_number(dense["perplexity"][text]) for _, text in columns)]]
    for method in dict.fromkeys(method for method, _ in cells):
        line = [method]
        for ratio, text in columns:
            row = cells.get((method, ratio))
            line.append("" if row is None else _cell(row, text, dense, best[tuple(row["parts"]), ratio, text]))
        lines.append(line)
    return table(["method", *(f"{ratio * 100:g}%: {text}" for ratio, text in columns)], lines)


def _cell(row: Entry, text: str, dense: Entry, best: float) -> str:
    """Perplexity with its increase, and what was removed where that is not the ratio."""
    value = row["perplexity"][text]
    rise = value - dense["perplexity"][text]
    shown = f"{_number(value)} ({rise:+.2f})" if abs(rise) < 1000 else _number(value)
    shown = f"**{shown}**" if value == best else shown
    return shown if abs(row["removed"] - row["ratio"]) < NEAR else f"{shown} at {row['removed']:.1%}"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}" if value < 100_000 else f"{value:.1e}"


def diagnostic_table(rows: Sequence[Entry]) -> str:
    """Increase when QK and OV are cut alone and together, and the share of each objective that was lost."""
    dense = next(row for row in rows if row["method"] == "dense")
    text = next(iter(dense["perplexity"]))
    cut = {(tuple(row["parts"]), row["ratio"]): row for row in rows if row is not dense and row["name"] == "a3"}
    ratios = sorted({ratio for _, ratio in cut})

    def rise(part: tuple[str, ...], ratio: float) -> float:
        return float(cut[part, ratio]["perplexity"][text] - dense["perplexity"][text])

    parts = {"QK": ("qk",), "OV": ("ov",), "both": ("qk", "ov")}
    lines = [[name, *(f"{rise(part, r):.3f}" for r in ratios)] for name, part in parts.items()]
    lines.insert(2, ["QK + OV", *(f"{rise(('qk',), r) + rise(('ov',), r):.3f}" for r in ratios)])
    for part in ("qk", "ov"):
        lost = [f"{cut[(part,), r]['objective_lost'][part]:.2%}" for r in ratios]
        lines.append([f"{part.upper()} objective lost", *lost])
    return table([f"increase on {text}, a3", *(f"{r * 100:g}%" for r in ratios)], lines)


def ratio_figure(name: str, text: str | None, plot: Plot) -> None:
    """Perplexity against the share removed, a line per method."""
    rows = rows_of(f"{name}.json")
    dense = next(row for row in rows if row["method"] == "dense")
    text = text or next(iter(dense["perplexity"]))
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row is not dense:
            lines.setdefault(row["method"], []).append((100 * row["removed"], row["perplexity"][text]))
    base = dense["perplexity"][text]
    shown = {name: points for name, points in lines.items() if min(points)[1] < BROKEN * base}
    plot.lines(shown, dense=base)
    plot.label(f"{dense['model']}, {text}", "removed (%)", "perplexity")


TABLES = {"comparisons": comparisons, "kv-stories-mpt": partial(recipe_table, "kv-stories-mpt")}
FIGURES = {name: partial(ratio_figure, name, text) for name, text in LINES.items()}
