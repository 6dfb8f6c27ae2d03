"""The paper's A3 on the three small real models, as the core protocol asks: one receipt per row.

    .venv/bin/python experiments/core_protocol.py            # every row that has no receipt yet
    .venv/bin/python experiments/core_protocol.py smollm2    # only rows whose name starts so

SmolLM2-135M is dequantised from 4 bits. Calibration and evaluation are the first 16 windows of 1024 tokens of
WikiText-2's valid and test text; for the story models, windows of 256 tokens of one half of TinyStories each.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tables import keep_row, known
from texts import ASSETS, HALVES, ROOT, RUNS, split_stories

from trisect.support.checks import read_json

SMOLLM2 = ["smollm2-135m", "--calibration", ASSETS / "data/wikitext-2/valid.txt"]
SMOLLM2 += ["--eval", ASSETS / "data/wikitext-2/test.txt", "--samples", 16, "--length", 1024]
SMOLLM2 += ["--eval-windows", 16]
STORIES = ["--calibration", HALVES[0], "--eval", HALVES[1], "--samples", 128, "--length", 256]
STORIES += ["--eval-windows", 64, "--dtype", "float32"]

ROWS: dict[str, list[object]] = {
    "smollm2-12.5": [*SMOLLM2, "--ratio", 0.125],
    "smollm2-25": [*SMOLLM2, "--ratio", 0.25],
    "smollm2-37.5": [*SMOLLM2, "--ratio", 0.375],
    "smollm2-25-qk": [*SMOLLM2, "--ratio", 0.25, "--parts", "qk"],
    "smollm2-25-ov": [*SMOLLM2, "--ratio", 0.25, "--parts", "ov"],
    "smollm2-25-mlp": [*SMOLLM2, "--ratio", 0.25, "--parts", "mlp"],
    "stories15m-25": [ASSETS / "models/stories15m", *STORIES, "--ratio", 0.25],
    "stories-mpt-20m-25": [ASSETS / "models/stories-mpt-20m", *STORIES, "--ratio", 0.25],
}
REFERENCE = {"smollm2-12.5": 26.25, "smollm2-25": 37.49, "smollm2-37.5": 64.26}
"""Perplexities of a script by other hands, written before this code."""


def main(prefix: str = "") -> None:
    """Run the rows that are missing; outputs go to a scratch folder, receipts stay."""
    os.chdir(ROOT)
    split_stories()
    for name, arguments in ROWS.items():
        if not name.startswith(prefix) or name in known("core.json"):
            continue
        receipt = RUNS / f"core-{name}.json"
        command = [Path(sys.executable).with_name("trisect"), "compress", *arguments]
        command += ["-o", RUNS / f"core-{name}", "--json", receipt]
        command += ["--method", "a3", "--sampling", "first", "--align", "none"]
        print(name, flush=True)
        subprocess.run([str(word) for word in command], check=True)
        keep_row("core.json", row(name, read_json(receipt)))


def row(name: str, run: dict[str, Any]) -> dict[str, Any]:
    """What the documents show of a run, with its receipt."""
    receipt = {key: value for key, value in run["receipt"].items() if key not in ("plan", "losses")}
    return {
        "name": name,
        "model": Path(run["model"]).name,
        "ratio": receipt["recipe"]["ratio"],
        "parts": receipt["recipe"]["parts"],
        "kv_bytes_per_token": [run[side]["kv_bytes_per_token"] for side in ("before", "after")],
        "perplexity": run["perplexity"],
        "reference": REFERENCE.get(name),
        "receipt": receipt,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
