"""Tables of the documents, made from the receipts: `python experiments/tables.py` writes them in place.

A test checks that every table still says what its receipts say.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"


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
    receipt = json.loads((RESULTS / "a3plus-smollm2.json").read_text(encoding="utf-8"))
    texts = list(receipt["dense"])
    rows = [
        f"| method | removed | parts | {' | '.join(texts)} |",
        "|---|---|---|" + "---|" * len(texts),
        "| dense | - | - | " + " | ".join(f"{receipt['dense'][text]:.2f}" for text in texts) + " |",
    ]
    for row in receipt["rows"]:
        name = f"{row['method']} {row.get('allocate', 'uniform')}, align {row['align'] or 'none'}"
        parts = ", ".join(row.get("parts", ("qk", "ov", "mlp")))
        increases = " | ".join(f"+{row['increase'][text]:.2f}" for text in texts)
        rows.append(f"| {name} | {row['ratio']:.1%} | {parts} | {increases} |")
    return "\n".join(rows)


TABLES = {"core": core_table, "a3plus": a3plus_table}
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
