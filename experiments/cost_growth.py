"""How the cost of compressing grows: seconds and peak memory against layers, widths and tokens.

    python experiments/cost_growth.py --device cuda
    .venv/bin/python experiments/cost_growth.py --device cpu      # smaller sizes, seconds of the process

One size at a time is doubled from a common start; the exponent is the slope of a straight line through the
logarithms. Random weights, streamed from main memory. Lines that the file has are not measured again; `make
results` draws the figure.
"""

import argparse
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import scale_shapes
import torch
from scale_shapes import Case, measure
from tables import keep_row, known

FILE = "cost-growth.json"
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
SMALLER = 4
"""On a CPU widths and windows are this much smaller, windows as much shorter, and there is no last step."""
EXPECTED = {
    "a3": {
        "layers": {"seconds": 1.0, "memory": 0.0},
        "d_model": {"seconds": 2.0, "memory": 2.0},
        "d_inter": {"seconds": 1.0, "memory": 1.0},
        "tokens": {"seconds": 1.0, "memory": 1.0},
    },
    "a3+": {
        "layers": {"seconds": 1.0, "memory": 0.0},
        "d_model": {"seconds": 3.0, "memory": 2.0},
        "d_inter": {"seconds": 3.0, "memory": 2.0},
        "tokens": {"seconds": 1.0, "memory": 1.0},
    },
}
"""At most. a3: forward passes, linear in tokens and d_inter, quadratic in d_model, as heads are added;
in memory one layer and the hidden states. a3+ adds Grams of the head outputs and of the neurons, quadratic in
memory, and their inverses, cubic in time."""


def sizes_for(name: str, value: int) -> tuple[dict[str, int], int]:
    """The shape, and the number of windows."""
    key, _ = STEPS[name]
    sizes = dict(START)
    if key is None:
        return sizes, value
    sizes[key] = value
    if name == "d_model":  # heads keep their width
        sizes["num_attention_heads"], sizes["num_key_value_heads"] = value // 128, value // 512
    return sizes, 64


def smaller(sizes: dict[str, int], windows: int) -> tuple[dict[str, int], int]:
    """The same proportions for a CPU."""
    widths = ("hidden_size", "intermediate_size", "vocab_size")
    cut = {name: value // SMALLER if name in widths else value for name, value in sizes.items()}
    return {**cut, "head_dim": 128 // SMALLER}, max(1, windows // SMALLER)


def exponent(points: list[tuple[float, float]]) -> float:
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / sum((x - mean_x) ** 2 for x, _ in logs)


def one(sizes: dict[str, int], method: str, *, device: str, windows: int, length: int) -> dict[str, Any]:
    """One shape; the first run of a process pays for what is loaded then, so a small one goes before it."""
    small = {**START, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 8}
    for shape in (small, sizes):
        scale_shapes.SHAPES["growth"] = shape
        scale_shapes.CASES["growth"] = Case(shape="growth", method=method)
        found = measure("growth", device=device, samples=windows, length=length)
    return found


def apart(*arguments: Any, **settings: Any) -> dict[str, Any]:
    """The same in a process of its own: memory that an earlier run gave back is not counted as free."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 17)  # what is freed goes back to the system at once
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(one, *arguments, **settings).result()


def grow(name: str, method: str, *, device: str, length: int) -> dict[str, Any]:
    rows = []
    on_cpu = torch.device(device).type == "cpu"
    values = STEPS[name][1]
    for value in values[:-1] if on_cpu else values:
        sizes, windows = sizes_for(name, value)
        if on_cpu:
            sizes, windows = smaller(sizes, windows)
        run = apart if on_cpu else one
        found = run(sizes, method, device=device, windows=windows, length=length // SMALLER if on_cpu else length)
        size = windows if name == "tokens" else sizes[str(STEPS[name][0])]
        rows.append({"value": size, "seconds": found["seconds"], "peak_bytes": found["peak_bytes"]})
        print(name, method, rows[-1], flush=True)
    slopes = {
        word: exponent([(row["value"], row[key]) for row in rows])
        for word, key in (("seconds", "seconds"), ("memory", "peak_bytes"))
    }
    return {"rows": rows, "exponents": slopes, "receipt": found["receipt"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=int, default=1024)
    options = parser.parse_args()
    for size in STEPS:
        for method, expected in EXPECTED.items():
            name = f"{size} {method}"
            if name not in known(FILE):
                row = grow(size, method, device=options.device, length=options.length)
                about = {"name": name, "size": size, "method": method, "expected": expected[size]}
                keep_row(FILE, {**about, **row, "device": options.device})


if __name__ == "__main__":
    main()
