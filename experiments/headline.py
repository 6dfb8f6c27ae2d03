"""What the README says of the results: as little as a newcomer needs."""

import a3plus_tables as a3plus
import speed_tables as speed
from tables import Entry, found, read, table

GPU = "bench-h200"
RATIO = 0.25
NAMES = {
    "a3+ balanced": "a3+, `--allocate balanced`",
    "a3+ uniform": "a3+",
    "a3 uniform": "a3, the paper",
    "svd-llm uniform": "svd-llm",
}
"""Rows of the README's table in their order -> what they are called there."""
OWN_WORDS = "a3+, `--allocate balanced`, half own words"


def accuracy_table() -> str:
    """For the README: one ratio, two texts, the paper's method and ours, and what the others do."""
    dense, rows = a3plus.a3plus_rows()
    known = {a3plus.row_name(row): row for row in rows if row["settings"]["ratio"] == RATIO}
    lines = [["dense", "-", *_perplexities(dense)]]
    for name, shown in NAMES.items():
        if name in known:
            lines.append([shown, f"{known[name]['removed']:.1%}", *_perplexities(known[name]["perplexity"])])
    if found("a3plus-own-words.json"):
        lines[1:1] = [
            [OWN_WORDS, f"{row['removed']:.1%}", *_perplexities(row["perplexity"])]
            for row in read("a3plus-own-words.json")["rows"]
            if a3plus.row_name(row) == "a3+ balanced" and row["settings"]["ratio"] == RATIO
        ]
    return table(["method", "removed", "perplexity, WikiText-2", "perplexity, C4"], lines)


def _perplexities(measured: Entry) -> list[str]:
    return [f"{measured[text]:.1f}" for text in (a3plus.WIKITEXT, a3plus.C4)]


def machine_lines() -> str:
    """Speed of the narrow model, and memory that compressing takes, wherever they were measured."""
    lines = [f"- {line}" for bench in speed.BENCHES for line in _gains(bench)]
    if found(f"{GPU}/rows.json") and any(
        row["against_dense"]["share_of_limit"] > 1 for row in speed.asked_rows(GPU)
    ):
        lines.append(
            "- Limits count what was taken away. Gains on the GPU pass theirs because our runtime also fuses "
            "what the stock dense model runs as several kernels; docs/results.md has the two apart."
        )
    if found("stream-cpu.json"):
        file = read("stream-cpu.json")
        lines.append(
            f"- Compressing a checkpoint of {file['model_bytes'] / 1e9:.2f} GB layer by layer took "
            f"{file['streamed']['peak_bytes'] / 1e9:.2f} GB of memory at its peak, "
            f"{file['in_memory']['peak_bytes'] / 1e9:.2f} GB without `--stream`."
        )
    return "\n".join(lines)


def _gains(bench: str) -> list[str]:
    """One line per model and ratio: each phase against the dense model, and its limit."""
    told: dict[str, list[str]] = {}
    if not found(f"{bench}/rows.json"):
        return []
    for row in speed.asked_rows(bench):
        case = row["case"]
        if "/" not in case["asked"]:  # widths by name are for who compares them
            size = f"{case['batch']} x {case['length']}" + (f" + {case['new']}" if case["new"] else "")
            gain, limit = row["against_dense"]["speedup"], row["against_dense"]["limit"]
            name = f"{case['subject']}, {row['removed']:.0%} removed, {case['device']}"
            told.setdefault(name, []).append(
                f"{case['phase']} ({size}) {gain:.2f}x as fast as dense, limit {limit:.2f}x"
            )
    return [f"{name}: {'; '.join(gains)}." for name, gains in told.items()]
