"""Tables of experiments/trust.py: how far a3+ moves between machines, what calibration texts are worth."""

from collections import defaultdict

from tables import Entry, found, provenance, read, table

SPREAD, TEXTS = "spread.json", "calibration-texts.json"
SMOLLM2 = "smollm2-135m"
Key = tuple[str, str, str]


def spread_table() -> str:
    """Per model and size: perplexities of each seed over machines, threads, batches and precisions."""
    if not found(SPREAD):
        return ""
    rows = read(SPREAD)["rows"]
    groups: dict[Key, dict[str, dict[int, list[float]]]] = defaultdict(lambda: {"a3": {}, "a3+": {}})
    for row in rows:
        key = row["model"], f"{row['windows']} x {row['length']}", row["device"]
        value = next(iter(row["perplexity"].values()))
        groups[key][row["method"]].setdefault(row["seed"], []).append(value)
    lines = []
    for (model, size, device), methods in sorted(groups.items()):
        ours = methods["a3+"]
        if not ours:
            continue
        within = max(max(values) / min(values) - 1 for values in ours.values())
        lines.append(
            [
                model,
                size,
                "H200" if device == "cuda" else "CPU",
                str(sum(map(len, ours.values()))),
                _range(ours),
                f"{within:.2%}",
                _range(methods["a3"]),
            ]
        )
    header = ["model", "tokens", "on", "runs of a3+", "a3+", "most within one seed", "a3"]
    return table(header, lines) + "\n\n" + provenance(rows)


def _range(seeds: dict[int, list[float]]) -> str:
    """Lowest to highest over all runs."""
    values = [value for several in seeds.values() for value in several]
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"


def texts_table() -> str:
    """Perplexity on several texts by what was calibrated on."""
    if not found(TEXTS):
        return ""
    rows = sorted(read(TEXTS)["rows"], key=lambda row: (row["method"] != "dense", row["method"], row["windows"]))
    names = list(rows[0]["evaluate"])
    lines = [[_label(row), *(f"{row['perplexity'][name]:.1f}" for name in names)] for row in rows]
    return table(["calibrated on", *names], lines) + "\n\n" + provenance(rows)


def _label(row: Entry) -> str:
    if row["method"] == "dense":
        return "dense"
    return f"{row['method']}, {row['windows']} windows of {', '.join(row['calibration'])}"


def headline_table() -> str:
    """For the README: a quarter removed from SmolLM2, seeds and precisions together."""
    if not found(SPREAD) or not found(TEXTS):
        return ""
    dense = next(row for row in read(TEXTS)["rows"] if row["method"] == "dense")["perplexity"]["wikitext-2"]
    lines = [["dense", f"{dense:.1f}"]]
    for method, name in (("a3+", "a3+"), ("a3", "a3, the paper")):
        seeds: dict[int, list[float]] = {}
        for row in read(SPREAD)["rows"]:
            if (row["model"], row["method"], row["device"]) == (SMOLLM2, method, "cuda"):
                seeds.setdefault(row["seed"], []).append(row["perplexity"]["wikitext-2"])
        lines.append([name, _range(seeds)])
    return table(["method", "perplexity, WikiText-2"], lines)
