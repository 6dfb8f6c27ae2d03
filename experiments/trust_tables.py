"""Tables of experiments/trust.py: how far a3+ moves between machines, what calibration texts are worth."""

from collections import defaultdict
from statistics import geometric_mean, mean

from figures import Plot
from tables import Entry, provenance, rows_of, table

SPREAD, TEXTS, FEW, ACCURACY = "spread.json", "calibration-texts.json", "few-tokens.json", "accuracy.json"
CHOOSING = "alpaca"
"""The text that options are chosen on, so that no table reports it."""
SMOLLM2 = "smollm2-135m"
SHOWN = "c4"  # the text of the figure
UNUSED = ("lambada", "tinystories", "alpaca")
"""Texts that no row is calibrated on."""
Key = tuple[str, str, str]


def spread_table() -> str:
    """Per model and size: perplexities of each seed over machines, threads, batches and precisions."""
    rows = rows_of(SPREAD)
    dense = {(row["model"], row["device"]): _value(row) for row in rows if row["method"] == "dense"}
    groups: dict[Key, dict[str, dict[int, list[float]]]] = defaultdict(lambda: {"a3": {}, "a3+": {}})
    processors: dict[Key, set[str]] = defaultdict(set)
    for row in rows:
        if row["method"] == "dense":
            continue
        key = row["model"], f"{row['windows']} x {row['length']}", row["device"]
        groups[key][row["method"]].setdefault(row["seed"], []).append(_value(row))
        if row["method"] == "a3+":
            processors[key].add(row["receipt"]["hardware"]["cpu"])
    lines = []
    for key, methods in sorted(groups.items()):
        ours, (model, size, device) = methods["a3+"], key
        if not ours:
            continue
        before, count = dense[model, device], len(processors[key])
        within = max(max(values) / min(values) - 1 for values in ours.values())
        lines.append(
            [
                model,
                size,
                "H200" if device == "cuda" else f"{count} CPU" + "s" * (count > 1),
                f"{before:.2f}",
                str(sum(map(len, ours.values()))),
                _range(ours),
                f"{within:.2%}",
                _between_seeds(ours, before),
                _range(methods["a3"]),
            ]
        )
    header = ["model", "tokens", "on", "dense", "runs of a3+", "a3+", "most within one seed"]
    header += ["increase, between seeds", "a3"]
    return table(header, lines) + "\n\n" + provenance(rows)


def accuracy_table() -> str:
    """Per model, text and share removed: perplexities, and a3+'s increase as a share of a3's on the same tokens."""
    rows = rows_of(ACCURACY)
    dense = {row["model"]: row["perplexity"] for row in rows if row["method"] == "dense"}
    cells: dict[tuple[str, str, float], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in (row for row in rows if row["method"] != "dense"):
        for text, value in row["perplexity"].items():
            cells[row["model"], text, row["ratio"]][_kind(row)].append(value)
    kinds = ["svd-llm", "asvd", "a3", "a3+", "a3+ balanced", "a3+ best"]
    lines = []
    for (model, text, ratio), values in sorted(cells.items()):
        if text == CHOOSING:
            continue
        before = dense[model][text]
        paper = values["a3"] and mean(values["a3"]) - before
        shares = [
            f"{(mean(values[kind]) - before) / paper:.2f}" if paper and values[kind] else "-" for kind in kinds[3:]
        ]
        lines.append(
            [model, text, f"{ratio:.1%}", f"{before:.2f}", *(_spread(values[kind]) for kind in kinds), *shares]
        )
    header = ["model", "text", "removed", "dense", *kinds, "a3+, share of a3's increase", "balanced", "best"]
    return table(header, lines) + "\n\n" + provenance(rows)


def _spread(values: list[float]) -> str:
    """The value, or lowest to highest of several seeds."""
    return "-" if not values else _range(dict(enumerate([value] for value in values)))


def _value(row: Entry) -> float:
    value: float = next(iter(row["perplexity"].values()))
    return value


def _between_seeds(seeds: dict[int, list[float]], dense: float) -> str:
    """How far the seeds' mean increases over the dense model are apart."""
    if len(seeds) < 2:
        return "-"
    increases = [sum(values) / len(values) - dense for values in seeds.values()]
    return f"{max(increases) / min(increases) - 1:.1%}"


def _range(seeds: dict[int, list[float]]) -> str:
    """Lowest to highest over all runs."""
    values = [value for several in seeds.values() for value in several]
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def texts_table() -> str:
    """Perplexity on several texts by what was calibrated on."""
    rows = sorted(rows_of(TEXTS), key=_place)
    names, dense = list(rows[0]["evaluate"]), rows[0]["perplexity"]
    lines = [
        [
            _label(row),
            *(f"{row['perplexity'][name]:.1f}" for name in names),
            f"{geometric_mean([row['perplexity'][name] / dense[name] for name in UNUSED]):.2f}",
        ]
        for row in rows
    ]
    header = ["calibrated on", *names, "to dense on " + ", ".join(UNUSED)]
    return table(header, lines) + "\n\n" + provenance(rows)


def _place(row: Entry) -> tuple[int, list[str], int, int]:
    """The dense model, then a3+, then a3; the same texts together, few windows first."""
    return ["dense", "a3+", "a3"].index(row["method"]), row["calibration"], row["windows"], row["seed"]


def _label(row: Entry) -> str:
    if row["method"] == "dense":
        return "dense"
    label = f"{row['method']}, {row['windows']} windows of {', '.join(row['calibration'])}"
    return f"{label}, seed {row['seed']}" if row["seed"] else label


def few_table() -> str:
    """a3+ beside a3, each seed, where there is next to nothing to calibrate on."""
    rows = sorted(rows_of(FEW), key=lambda row: (row["seed"], row["method"]))
    names = list(rows[0]["evaluate"])
    lines = [[str(row["seed"]), row["method"], *(f"{row['perplexity'][name]:.1f}" for name in names)] for row in rows]
    return table(["seed", "method", *names], lines) + "\n\n" + provenance(rows)


def headline_table() -> str:
    """For the README: a quarter removed from SmolLM2, on texts of the calibration mixture and on two others."""
    cells: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows_of(ACCURACY):
        if row["model"] == SMOLLM2 and row["ratio"] in (0.0, 0.25):
            for text, value in row["perplexity"].items():
                cells[_kind(row)][text].append(value)
    names = {
        "dense": "dense",
        "a3+ best": "a3+ `--best`",
        "a3+ balanced": "a3+ `--allocate balanced`",
        "a3+": "a3+",
        "a3": "a3, the paper",
    }
    names |= {"svd-llm": "svd-llm", "asvd": "asvd"}
    texts = [text for text in cells["dense"] if text != CHOOSING]
    lines = [[name, *(_spread(cells[kind][text]) for text in texts)] for kind, name in names.items() if kind in cells]
    return table(["perplexity", *texts], lines)


def _kind(row: Entry) -> str:
    """What a row is called: method, allocation, what was left out."""
    allocate = "best" if row.get("refine") else row.get("allocate") or ""
    words = [row["method"], allocate, *(f"without {name}" for name in row.get("without") or ())]
    return " ".join(filter(None, words))


def accuracy_figure(plot: Plot) -> None:
    """SmolLM2 on C4: the mean over seeds against the share removed, a line per method."""
    rows = [row for row in rows_of(ACCURACY) if row["model"] == SMOLLM2]
    points: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["method"] != "dense":
            points[_kind(row)][100 * row["ratio"]].append(row["perplexity"][SHOWN])
    dense = next(row["perplexity"][SHOWN] for row in rows if row["method"] == "dense")
    lines = {kind: [(x, mean(values)) for x, values in found.items()] for kind, found in points.items()}
    plot.lines(lines, dense=dense)
    plot.label(f"{SMOLLM2}, {SHOWN}", "removed from the decoder (%)", "perplexity")


def spread_figure(plot: Plot) -> None:
    """Increase of a3+ as a share of a3's, by model, tokens and device."""
    rows = rows_of(SPREAD)
    dense = {(row["model"], row["device"]): _value(row) for row in rows if row["method"] == "dense"}
    rises: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda row: (row["model"], row["device"], row["windows"])):
        if row["method"] != "dense":
            label = f"{row['model']}, {row['windows']} x {row['length']}"
            rises[label][row["method"]].append(_value(row) - dense[row["model"], row["device"]])
    plot.bars({label: mean(both["a3+"]) / mean(both["a3"]) for label, both in rises.items() if both["a3+"]})
    plot.figure.subplots_adjust(left=0.4)
    plot.label("a quarter removed", "increase of a3+ as a share of a3's", "", legend=False)


def texts_figure(plot: Plot) -> None:
    """Perplexity over the dense model's on texts that took no part, by calibration text."""
    rows = sorted(rows_of(TEXTS), key=_place)
    dense = rows[0]["perplexity"]
    ratios = {
        f"{row['method']}: {', '.join(row['calibration'])}": geometric_mean(
            [row["perplexity"][name] / dense[name] for name in UNUSED]
        )
        for row in rows
        if row["windows"] == 64 and row["seed"] == 0
    }
    plot.bars(ratios)
    plot.figure.subplots_adjust(left=0.42)
    plot.label("64 windows, a quarter removed", f"to dense on {', '.join(UNUSED)}", "", legend=False)


TABLES = {
    "headline": headline_table,
    "results-spread": spread_table,
    "calibration-texts": texts_table,
    "few-tokens": few_table,
    "accuracy": accuracy_table,
}
FIGURES = {"accuracy": accuracy_figure, "spread": spread_figure, "calibration-texts": texts_figure}
