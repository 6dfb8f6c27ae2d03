"""The paper's A3 on the three small real models, as the core protocol asks: one receipt per row.

    .venv/bin/python experiments/core_protocol.py            # every row that has no receipt yet
    .venv/bin/python experiments/core_protocol.py smollm2    # only rows whose name starts so

SmolLM2-135M is dequantised from 4 bits. Calibration and evaluation are the first 16 windows of 1024 tokens of
WikiText-2's valid and test text (TinyStories windows of 256 for the story models).
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ASSETS = Path(os.environ.get("TRISECT_ASSETS") or HERE.parents[1] / "shared")
WIKITEXT = ASSETS / "data" / "wikitext-2"
STORIES = ASSETS / "data" / "tinystories" / "tinystories.txt"

SMOLLM2 = ["smollm2-135m", "--calibration", WIKITEXT / "valid.txt", "--eval", WIKITEXT / "test.txt"]
SMOLLM2 += ["--samples", 16, "--length", 1024, "--eval-windows", 16]
TALES = ["--calibration", STORIES, "--eval", STORIES, "--samples", 64, "--length", 256]
TALES += ["--eval-windows", 32, "--dtype", "float32"]

ROWS: dict[str, list[object]] = {
    "smollm2-12.5": [*SMOLLM2, "--ratio", 0.125],
    "smollm2-25": [*SMOLLM2, "--ratio", 0.25],
    "smollm2-37.5": [*SMOLLM2, "--ratio", 0.375],
    "smollm2-25-qk": [*SMOLLM2, "--ratio", 0.25, "--parts", "qk"],
    "smollm2-25-ov": [*SMOLLM2, "--ratio", 0.25, "--parts", "ov"],
    "smollm2-25-mlp": [*SMOLLM2, "--ratio", 0.25, "--parts", "mlp"],
    "stories15m-25": [ASSETS / "models" / "stories15m", *TALES, "--ratio", 0.25],
    "stories-mpt-20m-25": [ASSETS / "models" / "stories-mpt-20m", *TALES, "--ratio", 0.25],
}


def main(prefix: str = "") -> None:
    """Run the rows that are missing; outputs go to a scratch folder, receipts stay."""
    for name, arguments in ROWS.items():
        receipt = HERE / "results" / f"core-{name}.json"
        if not name.startswith(prefix) or receipt.exists():
            continue
        command = [Path(sys.executable).with_name("trisect"), "compress", *arguments]
        command += ["-o", HERE.parent / "runs" / f"core-{name}", "--json", receipt]
        command += ["--method", "a3", "--sampling", "first", "--align", "none"]
        print(name, flush=True)
        subprocess.run([str(word) for word in command], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
