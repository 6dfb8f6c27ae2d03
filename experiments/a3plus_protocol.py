"""a3 and a3+ on SmolLM2-135M with 64 windows of 2048 tokens: increase in perplexity, in and out of domain.

    .venv/bin/python experiments/a3plus_protocol.py [DEVICE]     # cuda: about seven minutes; cpu: hours

Calibration: random windows of WikiText-2 valid (seed 0). Evaluation: the first 64 windows of WikiText-2 test,
and 32 windows of C4, which is another domain. The model is dequantised from 4 bits. Writes one receipt.
"""

import copy
import os
import sys
import time
from pathlib import Path
from typing import Any

from trisect.config import CompressConfig
from trisect.data import load_tokens
from trisect.evaluate.perplexity import perplexity
from trisect.models import load_model, shape_of
from trisect.pipeline import compress
from trisect.plan import budget_of, compare
from trisect.receipt import build_receipt, write_json

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("TRISECT_ASSETS") or ROOT.parent / "shared") / "data"
MODEL = os.environ.get("TRISECT_MODEL", "smollm2-135m")
RESULT = ROOT / "experiments" / "results" / "a3plus-smollm2.json"
CURVES = ROOT / "runs" / "curves-smollm2.json"

ROWS: list[dict[str, Any]] = [
    *({"method": "a3", "ratio": ratio, "align": None} for ratio in (0.125, 0.25, 0.375)),
    *({"method": "a3+", "ratio": ratio, "align": None} for ratio in (0.125, 0.25, 0.375)),
    *(
        {"method": "a3+", "ratio": ratio, "align": 8, "allocate": "balanced"}
        for ratio in (0.125, 0.25, 0.375)
    ),
    {"method": "a3+", "ratio": 0.25, "align": 16, "allocate": "balanced"},
    {"method": "a3+", "ratio": 0.25, "align": None, "parts": ("qk",)},
    {"method": "a3", "ratio": 0.25, "align": 8, "allocate": "balanced"},
]


def main(device: str = "cpu") -> None:
    """Run every row and write the receipt."""
    loaded = load_model(MODEL, device=device)
    cut = {"length": 2048, "seed": 0}
    tokens = load_tokens(
        str(DATA / "wikitext-2/valid.txt"), loaded.tokenizer, samples=64, sampling="random", **cut
    )
    texts = {
        "wikitext-2 test": ("wikitext-2/test.txt", 64),
        "c4": ("c4/c4.txt", 32),
    }
    judged = {
        name: load_tokens(str(DATA / file), loaded.tokenizer, samples=n, sampling="first", **cut)
        for name, (file, n) in texts.items()
    }
    dense = {name: perplexity(loaded.model, ids).perplexity for name, ids in judged.items()}
    before = budget_of(shape_of(loaded.model))
    rows = []
    for settings in ROWS:
        model, started = copy.deepcopy(loaded.model), time.perf_counter()
        compress(model, CompressConfig(**settings), tokens=tokens, curves=CURVES)
        seconds = time.perf_counter() - started
        increase = {name: perplexity(model, ids).perplexity - dense[name] for name, ids in judged.items()}
        removed = compare(before, budget_of(shape_of(model))).ratio
        rows.append({**settings, "removed": removed, "increase": increase, "seconds": seconds})
        print(rows[-1], flush=True)
    receipt = build_receipt({"model": MODEL, "rows": ROWS}, seed=0, token_hash=tokens.hash, timings={})
    write_json(RESULT, {"dense": dense, "rows": rows, "receipt": receipt})


if __name__ == "__main__":
    main(*sys.argv[1:])
