"""The recipe of these tests, over a tiny model in the current folder."""

from pathlib import Path
from typing import Any

import yaml

RECIPE: dict[str, Any] = {
    "name": "small",
    "title": "A small comparison",
    "models": [{"name": "tiny llama", "source": "tiny", "dtype": "float32"}],
    "methods": [
        "a3",
        {"name": "clover", "parts": ["qk", "ov"]},
        {"name": "a3", "parts": ["qk", "ov"]},
        {"name": "a3", "parts": ["qk"]},
        {"name": "a3", "parts": ["ov"], "ratios": [0.25, 0.5, 0.99]},  # the last one cannot be done
    ],
    "ratios": [0.25, 0.5],
    "align": "none",
    "calibration": {"source": "text.txt", "samples": 4, "length": 32, "sampling": "first"},
    "evaluation": [
        {"name": "fox", "data": "text.txt", "length": 32, "windows": 2},
        {"name": "topics", "data": "builtin", "length": 32, "windows": 2},
    ],
}
NUM_CELLS = 1 + 4 * 2 + 3
IMPOSSIBLE = "a3 ov"


def write_recipe(folder: Path, **changes: Any) -> Path:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, **changes}, sort_keys=False))
    return path
