"""Accuracy of the paper's A3 on small models beside the reference figures, and of every method on tasks."""

from tables import Entry, found, read, read_all, table, targets, verdict


def core_table() -> str:
    """The paper's A3 on the small real models, beside the reference figures."""
    asked = targets()["core"]
    header = ["model", "removed", "parts", "perplexity", "reference", "KV bytes per token"]
    rows = []
    for file, receipt in read_all("core-*.json").items():
        name = file.removeprefix("core-").removesuffix(".json")
        before, after = receipt["perplexity"]["before"], receipt["perplexity"]["after"]
        recipe, cache = receipt["receipt"]["recipe"], "kv_bytes_per_token"
        there = asked.get(name)
        rows.append(
            [
                name.rpartition("-25")[0] or name.rpartition("-")[0],
                f"{recipe['ratio']:.1%}",
                ", ".join(recipe["parts"]),
                f"{before['perplexity']:.2f} -> {after['perplexity']:.2f}",
                "" if there is None else f"{there:.2f} ({after['perplexity'] / there - 1:+.2%})",
                f"{receipt['before'][cache]:,} -> {receipt['after'][cache]:,}",
            ]
        )
    return table(header, rows)


def core_short() -> list[str]:
    asked, within = targets()["core"], targets()["core_within"]
    names = [name for name in asked if found(f"core-{name}.json")]
    apart = [
        abs(read(f"core-{name}.json")["perplexity"]["after"]["perplexity"] / asked[name] - 1)
        for name in names
    ]
    worst = max(apart)
    return [
        "Furthest from the reference figures: "
        + verdict(worst, within, shown=f"{worst:.2%}", asked=f"{within:.0%}")
        + ".",
        "The model is dequantised from 4 bits, and small models lose more than large ones.",
    ]


def _answered(folder: str) -> dict[str, Entry]:
    """Model -> its scores."""
    return {
        name.partition("/")[2].removesuffix(".json"): entry
        for name, entry in read_all(f"{folder}/*.json").items()
    }


def tasks_table(folder: str) -> str:
    """Zero-shot accuracy of SmolLM2 with a quarter of its decoder removed, best average first."""
    entries = sorted(_answered(folder).items(), key=lambda item: -item[1]["average"])
    tasks = list(entries[0][1]["scores"])
    lines = []
    for name, entry in entries:
        scores = [_percent(entry["scores"][task]["value"], entry["scores"][task]["stderr"]) for task in tasks]
        shown = name.replace("plusbalanced", "+ balanced").replace("plus", "+")
        lines.append([shown, *scores, _percent(entry["average"], entry["average_stderr"])])
    return table(["accuracy, %", *tasks, "average"], lines)


def tasks_short(folder: str) -> list[str]:
    entries = _answered(folder)
    limits = sorted({entry["limit"] for entry in entries.values()})
    lines = [
        f"At most {' or '.join(map(str, limits))} questions of each task.",
        "The dense model itself is near chance on most of these and below it on BoolQ, where cut models "
        "answer the majority's way. Only LAMBADA and PIQA, where the dense model is well above chance, "
        "say much.",
    ]
    if folder.endswith(("-mixed", "-own")):
        lines.append("The plan of a3+ balanced is from loss curves on WikiText-2 alone.")
    for name, shown in (("a3plus", "a3+"), ("a3plusbalanced", "a3+ balanced")):
        if {"a3", name} <= entries.keys():
            ours, paper = entries[name], entries["a3"]
            apart = ours["average"] - paper["average"]
            error = (ours["average_stderr"] ** 2 + paper["average_stderr"] ** 2) ** 0.5
            lines.append(
                f"The average of {shown} is {100 * apart:+.1f} points from a3's, with a standard error of "
                f"{100 * error:.1f} points for the difference, as if each had had questions of its own."
            )
    return lines


def _percent(value: float, error: float) -> str:
    return f"{100 * value:.1f} +- {100 * error:.1f}"
