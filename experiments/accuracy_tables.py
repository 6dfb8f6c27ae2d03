"""Accuracy: the paper's a3, shared frequencies, synthetic text, tasks, fine-tuning and exports."""

from pathlib import Path

from figures import Plot
from tables import Entry, read, rows_of, sourced, table

PROTOCOL = "python experiments/a3plus_protocol.py"
SYNTHETIC = {
    "uniform": "WikiText-2",
    "synthetic": "half WikiText-2, half synthetic",
    "synthetic-alone": "synthetic alone",
}
"""Section of experiments/a3plus_protocol.py -> what its rows were calibrated on."""
TUNED_ON_C4 = ("smollm2-0-c4", "smollm2-37.5-c4")
SEARCHED = ("asvd", "svd-llm-v2")
"""Methods that search for ranks where no allocation is named."""


def core() -> str:
    """The paper's a3 on small real models, beside figures of another implementation."""
    rows = rows_of("core.json")
    lines = []
    for row in rows:
        before, after = (row["perplexity"][side]["perplexity"] for side in ("before", "after"))
        reference = row["reference"]
        lines.append(
            [
                row["model"],
                f"{row['ratio']:.1%}",
                ", ".join(row["parts"]),
                f"{before:.2f} -> {after:.2f}",
                f"{reference:.2f} ({after / reference - 1:+.2%})" if reference else "",
                "{:,} -> {:,}".format(*row["kv_bytes_per_token"]),
            ]
        )
    header = ["model", "removed", "parts", "perplexity", "independent script", "KV bytes per token"]
    return sourced(table(header, lines), rows, "python experiments/core_protocol.py")


def row_name(row: Entry) -> str:
    """Method, allocation, and who shares rotation frequencies."""
    settings = row["settings"]
    scope = f", scope {settings['rope_scope']}" if "rope_scope" in settings else ""
    method = settings["method"]
    allocate = settings.get("allocate") or ("search" if method in SEARCHED else "uniform")
    return f"{method} {allocate}{scope}"


def rises(row: Entry, dense: Entry) -> list[str]:
    """Increase in perplexity by text."""
    values = [row["perplexity"][text] - value for text, value in dense.items()]
    return [f"{value:+.2f}" if value < 1000 else f"{value:+.1e}" for value in values]


def scopes() -> str:
    """Increase in perplexity where QK alone is cut, by who shares rotation frequencies."""
    file = read("a3plus-scopes.json")
    dense = file["dense"]
    lines = [["dense", "-", *(f"{value:.2f}" for value in dense.values())]]
    for row in file["rows"]:
        if row["settings"]["method"] != "dense":
            lines.append([row_name(row), f"{row['settings']['ratio']:.1%}", *rises(row, dense)])
    return sourced(table(["method, QK alone", "removed", *dense], lines), [file], f"{PROTOCOL} scopes --device cuda")


def positions() -> str:
    """Perplexity by position in the context, by who shares rotation frequencies."""
    rows = rows_of("a3plus-scopes.json")
    edges = rows[0]["by_position"]["edges"]
    spans = [f"{a}-{b - 1}" for a, b in zip(edges, edges[1:], strict=False)]
    lines = []
    for row in rows:
        dense = row["settings"]["method"] == "dense"
        name = "dense" if dense else f"{row_name(row)} at {row['settings']['ratio']:.1%}"
        lines.append([name, *(f"{value:.2f}" for value in row["by_position"]["perplexity"])])
    return table(["perplexity at positions", *spans], lines)


def synthetic() -> str:
    """Calibrated on text that the model generated: beside WikiText-2, and alone."""
    files = {section: read(f"a3plus-{section}.json") for section in SYNTHETIC}
    lines = []
    for section, file in files.items():
        lines += [
            [SYNTHETIC[section], row_name(row), f"{row['removed']:.1%}", *rises(row, file["dense"])]
            for row in sorted(file["rows"], key=lambda row: (row_name(row), row["removed"]))
        ]
    header = ["calibrated on", "method", "removed", *files["uniform"]["dense"]]
    entries = [files["synthetic"], files["synthetic-alone"], read("synthetic-text.json")]
    command = f"{PROTOCOL} synthetic|synthetic-alone --device cuda"
    return sourced(table(header, lines), entries, command)


def finetune(rows: list[Entry]) -> str:
    """One line per run and held-out text."""
    lines = []
    for row in rows:
        recipe, data = row["recipe"], row["data"]
        model = row["name"].rpartition("-")[0].rpartition("-")[0]
        passes = row["steps"] * recipe["batch_size"] * recipe["accumulate"]
        seen = str(min(passes, recipe["epochs"] * data["examples"]))
        for part in row["held_out"]:
            was, now = part["before"]["perplexity"], part["after"]["perplexity"]
            name = "/".join(Path(part["before"]["data"]).parts[-2:]).removeprefix("runs/")
            shared = str(row["shared_word_sequences"][part["before"]["data"]])
            cells = [f"{model}, {row['removed']:.1%}", Path(data["source"]).name, str(row["steps"]), seen]
            lines.append([*cells, name, shared, f"{was:.2f} -> {now:.2f} ({now / was - 1:+.1%})"])
    header = ["model, removed", "tuned on", "steps", "examples", "held out", "shared sequences", "perplexity"]
    return sourced(table(header, lines), rows, "python experiments/finetune_smollm2.py")


def all_finetune() -> str:
    """Every run."""
    return finetune(rows_of("finetune.json"))


def finetune_summary() -> str:
    """SmolLM2, dense and narrow, tuned on C4."""
    return finetune([row for row in rows_of("finetune.json") if row["name"] in TUNED_ON_C4])


def export() -> str:
    """The same model in stock transformers and in llama.cpp."""
    lines = []
    for model in rows_of("export.json"):
        for name, row in model["exports"].items():
            cells = [model["name"], name, f"{row['perplexity']:.4f}" if "perplexity" in row else ""]
            size = f"{row['bytes'] / 1e6:.1f} MB" if "bytes" in row else ""
            lines.append([*cells, _against(row), _greedy(row), size])
    header = ["model", "export", "perplexity", "against native", "same greedy texts", "file"]
    command = "python experiments/export_smollm2.py stories15m|smollm2|stories-moe|gemma"
    return sourced(table(header, lines), rows_of("export.json"), command)


def _against(row: Entry) -> str:
    if "relative_to_native" in row:
        return f"{row['relative_to_native']:+.3%}"
    if "largest_difference_of_logits" in row:
        return f"logits within {row['largest_difference_of_logits']:.0e} of {row['largest_logit']:.1f}"
    return f"{row['removed']:.1%} removed"


def _greedy(row: Entry) -> str:
    if "greedy" not in row:
        return ""
    same = f"{row['greedy']['same']} of {row['greedy']['texts']}"
    gaps = [parting["nats"] for parting in row.get("partings", [])]
    return f"{same}; the others differ at tokens within {max(gaps):.3f} nats of each other" if gaps else same


def core_figure(plot: Plot) -> None:
    """The paper's a3 on SmolLM2, all components, and the other implementation."""
    rows = [row for row in rows_of("core.json") if row["model"] == "smollm2-135m" and row["reference"]]
    ours = [(100 * row["ratio"], row["perplexity"]["after"]["perplexity"]) for row in rows]
    theirs = [(100 * row["ratio"], row["reference"]) for row in rows]
    plot.lines({"trisect": ours, "independent script": theirs}, dense=rows[0]["perplexity"]["before"]["perplexity"])
    plot.label("SmolLM2-135M, method a3, WikiText-2", "removed from the decoder (%)", "perplexity")


def finetune_figure(plot: Plot) -> None:
    """How far perplexity falls by tuning on C4, dense and narrow."""
    falls = {}
    for row in rows_of("finetune.json"):
        if row["name"] in TUNED_ON_C4:
            for part in row["held_out"]:
                was, now = part["before"], part["after"]
                text = next(name for name in ("wikitext-2", "c4", "alpaca") if name in was["data"])
                label = f"{row['removed']:.1%}: {text}"
                falls[label] = 100 * (1 - now["perplexity"] / was["perplexity"])
    plot.bars(falls)
    plot.label("SmolLM2-135M tuned on C4", "fall of perplexity (%) by share removed and text", "", legend=False)


TABLES = {
    "core": core,
    "scopes": scopes,
    "positions": positions,
    "synthetic": synthetic,
    "finetune": all_finetune,
    "finetune-summary": finetune_summary,
    "export": export,
}
FIGURES = {"core": core_figure, "finetune": finetune_figure}
