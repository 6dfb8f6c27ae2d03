"""Receipts in the forms that experiments write, with made-up numbers: for what nobody has measured yet."""

import json
from pathlib import Path
from typing import Any

RECEIPT = {
    "recipe": {},
    "seed": 0,
    "timings": {"read": 1.0, "forward": 20.0, "grams": 10.0, "mlp": 5.0},
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "0123456789abcdef",
    "versions": {"torch": "2.0.0"},
    "hardware": {"cpu": "a processor", "cores": 4, "gpu": "a GPU"},
}
TEXTS = ("wikitext-2 test", "c4")


def _rows(*settings: dict[str, Any]) -> dict[str, Any]:
    rows = [
        {"settings": one, "removed": 0.25, "perplexity": dict.fromkeys(TEXTS, 20.0 + at), "seconds": 1.0}
        for at, one in enumerate(settings)
    ]
    return {"dense": dict.fromkeys(TEXTS, 17.0), "rows": rows, "receipt": RECEIPT}


def _shape(case: str, seconds: float) -> dict[str, Any]:
    size, method = case.split("-")
    return {
        "case": case,
        "shape": f"llama-{size}",
        "method": method,
        "layers": 2,
        "tokens": 64,
        "seconds": seconds,
        "seconds_per_layer": seconds / 2,
        "whole_model_seconds": 16 * seconds,
        "peak_bytes": 30_000_000_000,
        "receipt": RECEIPT,
    }


def _growth() -> dict[str, Any]:
    rows = [{"value": 2**n, "seconds": 1.5 * 2**n, "peak_bytes": 10**9} for n in range(1, 5)]
    entry = {"rows": rows, "exponents": {"seconds": 1.0, "memory": 0.0}, "receipt": RECEIPT}
    return {
        "expected": {method: {"layers": {"seconds": 1.0, "memory": 0.0}} for method in ("a3", "a3+")},
        "growth": {"layers": {"a3": entry, "a3+": entry}},
        "device": "cpu",
    }


def write_results(folder: Path, *, bench_rows: dict[str, Any]) -> None:
    """One receipt for every section that may be empty."""
    a3 = {"method": "a3", "ratio": 0.25, "align": None}
    kills = {"kills": 50, "byte_identical": 50, "layers_finished_when_killed": [0, 3, 6], "receipt": RECEIPT}
    turned = {
        "name": "prefill",
        "way": "kernel",
        "seconds": 1e-5,
        "bytes_per_second": 3e12,
        "share_of_copy": 0.9,
    }
    prompt = {
        "name": "llama-3.2-3b",
        "batch": 1,
        "length": 1024,
        "kind": "trisect",
        "asked": "0.2",
        "seconds": 0.02,
        "launched_seconds": 0.019,
        "against_dense": 1.2,
        "paired": 1.1,
        "paired_p10": 1.0,
        "paired_p90": 1.3,
    }
    files: dict[str, Any] = {
        "a3plus-uniform.json": _rows(a3, {**a3, "method": "a3+"}),
        "a3plus-from-c4.json": _rows(a3, {**a3, "method": "a3+"}),
        "a3plus-own-words.json": _rows(a3, {**a3, "method": "a3+"}),
        "kill-and-resume.json": kills,
        "scale-8b-a3.json": _shape("8b-a3", 50.0),
        "scale-8b-a3plus.json": _shape("8b-a3+", 500.0),
        "scale-70b-a3.json": _shape("70b-a3", 10.0),
        "cost-growth/growth.json": _growth(),
        "short-prompts.json": {"rows": [prompt], "receipt": RECEIPT},
        "bench-h200/rows.json": bench_rows,
        "bench-h200/rotary.json": {"copy_bytes_per_second": 4e12, "rows": [turned], "receipt": RECEIPT},
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")
