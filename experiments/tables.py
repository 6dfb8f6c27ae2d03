"""Tables of the documents, made from the receipts: `python experiments/tables.py` writes them in place.

A test checks that every table still says what its receipts say.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
TASKS = RESULTS / "tasks-smollm2-25"


def core_table() -> str:
    """The paper's A3 on the small real models."""
    rows = ["| model | removed | parts | perplexity | KV bytes per token |", "|---|---|---|---|---|"]
    for path in sorted(RESULTS.glob("core-*.json")):
        receipt = json.loads(path.read_text(encoding="utf-8"))
        rows.append(_core_row(path.stem.removeprefix("core-"), receipt))
    return "\n".join(rows)


def _core_row(name: str, receipt: dict[str, Any]) -> str:
    before, after = receipt["perplexity"]["before"], receipt["perplexity"]["after"]
    recipe = receipt["receipt"]["recipe"]
    return (
        f"| {name.rpartition('-25')[0] or name.rpartition('-')[0]} | {recipe['ratio']:.1%} "
        f"| {', '.join(recipe['parts'])} "
        f"| {before['perplexity']:.2f} -> {after['perplexity']:.2f} "
        f"| {receipt['before']['kv_bytes_per_token']:,} -> {receipt['after']['kv_bytes_per_token']:,} |"
    )


def a3plus_table() -> str:
    """Increase in perplexity of a3 and a3+ on SmolLM2."""
    files = [_read(f"a3plus-{section}") for section in ("uniform", "balanced", "scopes")]
    dense, texts = files[0]["dense"], list(files[0]["dense"])
    rows = [
        f"| method | removed | parts | {' | '.join(texts)} |",
        "|---|---|---|" + "---|" * len(texts),
        "| dense | - | - | " + " | ".join(f"{dense[text]:.2f}" for text in texts) + " |",
    ]
    for row in (row for file in files for row in file["rows"] if row["settings"]["method"] != "dense"):
        settings = row["settings"]
        scope = f", rope scope {settings['rope_scope']}" if "rope_scope" in settings else ""
        name = f"{settings['method']} {settings.get('allocate', 'uniform')}{scope}"
        parts = ", ".join(settings.get("parts", ("qk", "ov", "mlp")))
        rises = " | ".join(f"+{row['perplexity'][text] - dense[text]:.2f}" for text in texts)
        rows.append(f"| {name} | {settings['ratio']:.1%} | {parts} | {rises} |")
    return "\n".join(rows)


def position_table() -> str:
    """Perplexity by position with folded frequencies, QK alone at 25%."""
    file = _read("a3plus-scopes")
    edges = file["rows"][0]["by_position"]["edges"]
    spans = [f"{a}-{b - 1}" for a, b in zip(edges, edges[1:], strict=False)]
    rows = [f"| | {' | '.join(spans)} |", "|---|" + "---|" * len(spans)]
    for row in file["rows"]:
        settings = row["settings"]
        name = " ".join([settings["method"], settings.get("rope_scope", "")]).strip()
        rows.append(f"| {name} | " + " | ".join(f"{x:.2f}" for x in row["by_position"]["perplexity"]) + " |")
    return "\n".join(rows)


def tasks_table() -> str:
    """Zero-shot accuracy of SmolLM2 with a quarter of its decoder removed."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in TASKS.glob("*.json")}
    order = sorted(found, key=lambda name: -found[name]["average"])
    tasks = list(found[order[0]]["scores"])
    rows = [f"| method | {' | '.join(tasks)} | average |", "|---|" + "---|" * (len(tasks) + 1)]
    for name in order:
        entry = found[name]
        values = [_percent(entry["scores"][task]["value"], entry["scores"][task]["stderr"]) for task in tasks]
        average = _percent(entry["average"], entry["average_stderr"])
        rows.append(f"| {name.replace('plus', '+')} | {' | '.join(values)} | {average} |")
    return "\n".join(rows)


def _percent(value: float, error: float) -> str:
    return f"{100 * value:.1f} +- {100 * error:.1f}"


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


TABLES = {"core": core_table, "a3plus": a3plus_table, "positions": position_table, "tasks": tasks_table}
DOCUMENTS = (ROOT / "README.md",)


def filled(text: str) -> str:
    """The document with every table between its markers made anew."""
    for name, table in TABLES.items():
        start, end = f"<!-- table:{name} -->\n", f"<!-- end:{name} -->"
        if start in text:
            head, _, rest = text.partition(start)
            _, _, tail = rest.partition(end)
            text = f"{head}{start}{table()}\n{end}{tail}"
    return text


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(encoding="utf-8")), encoding="utf-8")
