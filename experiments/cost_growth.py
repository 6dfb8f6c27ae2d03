"""How the cost of compressing grows: seconds and peak memory against layers, widths and tokens.

    python experiments/cost_growth.py --device cuda

One size at a time is doubled from a common start; the exponent is the slope of a straight line through the
logarithms. Random weights, streamed from main memory.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import scale_shapes
from scale_shapes import Case, measure

from trisect.files import write_json

RESULTS = Path(__file__).resolve().parent / "results"
START = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
STEPS = {
    "layers": ("num_hidden_layers", (2, 4, 8, 16)),
    "d_model": ("hidden_size", (1024, 2048, 4096, 8192)),
    "d_inter": ("intermediate_size", (4096, 8192, 16384, 28672)),
    "tokens": (None, (32, 64, 128, 256)),
}
EXPECTED = {
    "layers": {"seconds": 1.0, "memory": 0.0},
    "d_model": {"seconds": 1.0, "memory": 1.0},
    "d_inter": {"seconds": 1.0, "memory": 1.0},
    "tokens": {"seconds": 1.0, "memory": 1.0},
}
"""Of a3: forward passes, linear in everything, and one layer with the hidden states in memory. With a3+,
d_inter adds a Gram and its inverse: up to the second power in memory, the third in time."""


def sizes_for(name: str, value: int) -> tuple[dict[str, int], int]:
    """The shape, and the number of windows of 1024 tokens."""
    key, _ = STEPS[name]
    sizes = dict(START)
    if key is None:
        return sizes, value
    sizes[key] = value
    if name == "d_model":  # heads keep their width
        sizes["num_attention_heads"], sizes["num_key_value_heads"] = value // 128, value // 512
    return sizes, 64


def exponent(points: list[tuple[float, float]]) -> float:
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def grow(name: str, method: str, *, device: str, length: int) -> dict[str, Any]:
    rows = []
    for value in STEPS[name][1]:
        sizes, windows = sizes_for(name, value)
        scale_shapes.SHAPES["growth"] = sizes
        scale_shapes.CASES["growth"] = Case(shape="growth", method=method)
        found = measure("growth", device=device, samples=windows, length=length)
        memory = found["peak_device_bytes"]
        rows.append({"value": value, "seconds": found["seconds"], "peak_device_bytes": memory})
        print(name, method, rows[-1], flush=True)
        receipt = found["receipt"]
    slopes = {"seconds": exponent([(row["value"], row["seconds"]) for row in rows])}
    if rows[0]["peak_device_bytes"]:
        slopes["memory"] = exponent([(row["value"], row["peak_device_bytes"]) for row in rows])
    return {"rows": rows, "exponents": slopes, "receipt": receipt}


def draw(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(STEPS), figsize=(13, 5.5), sharey="row", layout="constrained")
    for column, name in enumerate(STEPS):
        for method, growth in found[name].items():
            for row, (key, unit, word) in enumerate(
                (("seconds", 1, "seconds"), ("peak_device_bytes", 1e9, "memory"))
            ):
                values = [(r["value"], r[key] / unit) for r in growth["rows"] if r[key]]
                if values:
                    label = f"{method}: power {growth['exponents'][word]:.2f}"
                    axes[row][column].loglog(*zip(*values, strict=True), marker="o", label=label)
        for row, word in enumerate(("seconds", "memory")):
            axes[row][column].legend(title=f"a3 expected at most {EXPECTED[name][word]:g}", fontsize=8)
            axes[row][column].set_xlabel(name if name != "tokens" else "windows of calibration")
    axes[0][0].set_ylabel("seconds")
    axes[1][0].set_ylabel("peak GB on the device")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=RESULTS / "cost-growth")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for name in STEPS:
        found[name] = {}
        for method in ("a3", "a3+"):
            found[name][method] = grow(name, method, device=options.device, length=options.length)
            write_json(options.out / "growth.json", {"expected": EXPECTED, "growth": found})
    draw(found, options.out / "growth.svg")


if __name__ == "__main__":
    main()
