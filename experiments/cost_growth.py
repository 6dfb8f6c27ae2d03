"""How the cost of compressing grows: seconds, peak memory and moments against layers, widths, tokens and experts.

    OMP_NUM_THREADS=1 .venv/bin/python experiments/cost_growth.py            # what the file has not yet
    OMP_NUM_THREADS=1 .venv/bin/python experiments/cost_growth.py --again    # everything, some ten minutes

One size at a time grows from a common start; the exponent is the slope of a straight line through the
logarithms, and beside it stands the slope of the operations, or bytes, that operation_counts.py counts at the
same points. Random weights in float32, one thread; every run is a process of its own, of which seconds and
memory are counted, the least of a few runs each. `make results` draws the table.
"""

import argparse
import math
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import scale_shapes
import torch
from operation_counts import IN_DOUBLE, Shape, memory, moments, operations
from scale_shapes import Case, ProcessMeter, build
from tables import keep_row, known

from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.pipeline import run as pipeline
from trisect.support.receipt import build_receipt

FILE = "cost-growth.json"
HEAD, VOCABULARY, LENGTH = 64, 512, 256
START = Shape(d_model=256, mlp=256, heads=4, kv_heads=2, head_dim=HEAD)
MIXTURE = replace(START, mlp=64, experts=8, active=2)
WINDOWS = 16
STEPS: dict[str, tuple[int, ...]] = {
    "layers": (1, 2, 4, 8),
    "d_model": (128, 256, 512, 1024),
    "MLP width": (96, 192, 384, 768),
    "tokens": (2048, 4096, 8192, 16384),
    "experts": (4, 8, 16, 24),
}
"""With five tokens or more for every neuron, so that a3+ refits all maps at every point."""
METHODS = ("a3", "a3+")
TIMES = 3


def case_for(name: str, value: int) -> tuple[Shape, int, int]:
    """The layer, how many there are, and the windows."""
    if name == "d_model":  # heads keep their width
        return replace(START, d_model=value, heads=value // HEAD, kv_heads=value // HEAD // 2), 1, WINDOWS
    if name == "MLP width":
        return replace(START, mlp=value), 1, WINDOWS
    if name == "experts":
        return replace(MIXTURE, experts=value), 1, WINDOWS
    return START, value if name == "layers" else 1, value // LENGTH if name == "tokens" else WINDOWS


def config_of(shape: Shape, layers: int) -> dict[str, int]:
    """The sizes as transformers names them."""
    sizes = {
        "hidden_size": shape.d_model,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": VOCABULARY,
    }
    if shape.experts > 1:
        sizes |= {"moe_intermediate_size": shape.mlp, "num_experts": shape.experts}
        sizes |= {"num_experts_per_tok": shape.active}
    return sizes


def measure(shape: Shape, layers: int, windows: int, method: str) -> dict[str, Any]:
    """Seconds of the process, what its memory rose by, and bytes of the largest step's moments."""
    torch.set_num_threads(1)
    # What is loaded at first use is paid for by a small model of the same kind.
    small = replace(shape, d_model=HEAD, mlp=32, heads=1, kv_heads=1, experts=min(shape.experts, 4))
    _once(small, 1, 8, method)
    return _once(shape, layers, windows, method)


def _once(shape: Shape, layers: int, windows: int, method: str) -> dict[str, Any]:
    scale_shapes.SHAPES["growth"] = config_of(shape, layers)
    scale_shapes.KINDS["growth"] = "Qwen3Moe" if shape.experts > 1 else "Llama"
    model = build(Case(shape="growth", method=method), device="cpu", dtype=torch.float32)
    ids = torch.randint(0, VOCABULARY, (windows, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens, config = tokens_from_tensor(ids, "random ids"), CompressConfig(ratio=0.25, method=method, align=None)
    sizes, solve = [0], pipeline.solve

    def weighed(method: Any, component: str, part: Any, found: Any, **given: Any) -> Any:
        sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in found.values()))
        return solve(method, component, part, found, **given)

    pipeline.solve = weighed
    meter = ProcessMeter()
    result = pipeline.compress(model, config, tokens=tokens)
    seconds, peak = meter.read()
    pipeline.solve = solve
    receipt = build_receipt(config.to_dict(), seed=0, token_hash=tokens.hash, timings=result.receipt["timings"])
    return {"seconds": seconds, "memory": peak, "moments": max(sizes), "receipt": receipt}


def apart(*arguments: Any) -> dict[str, Any]:
    """The same in a process of its own: memory that an earlier run gave back is not counted as free."""
    with multiprocessing.get_context("forkserver").Pool(1) as pool:
        return pool.apply(measure, arguments)


def counted(shape: Shape, layers: int, windows: int, method: str) -> dict[str, float]:
    """What operation counts say; numbers of 64 bits take twice the time."""
    given: dict[str, Any] = {"tokens": windows * LENGTH, "length": LENGTH, "refit": method == "a3+"}
    found = operations(shape, method, **given)
    work = sum((2 if stage in IN_DOUBLE else 1) * value for stage, value in found.items())
    return {
        "seconds": layers * work,
        "memory": memory(shape, method, **given),
        "moments": moments(shape, method, tokens=given["tokens"], refit=given["refit"]),
    }


def exponent(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The slope of a straight line through the logarithms, and its standard error."""
    logs = [(math.log(x), math.log(max(y, 1.0))) for x, y in points]
    mean_x, mean_y = (sum(values) / len(logs) for values in zip(*logs, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread
    missed = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in logs)
    return slope, math.sqrt(missed / (len(logs) - 2) / spread)


def grow(name: str, method: str) -> dict[str, Any]:
    """A measured and a counted exponent of every quantity, and the points."""
    rows, receipt = [], None
    for value in STEPS[name]:
        case = (*case_for(name, value), method)
        runs = [apart(*case) for _ in range(TIMES)]
        receipt = runs[0]["receipt"]
        least = {what: min(run[what] for run in runs) for what in ("seconds", "memory", "moments")}
        rows.append({"value": value, **least, "counted": counted(*case)})
        print(name, method, rows[-1], flush=True)
    found = {}
    for what in ("seconds", "memory", "moments"):
        slope, error = exponent([(row["value"], row[what] * (1e9 if what == "seconds" else 1)) for row in rows])
        expected, _ = exponent([(row["value"], row["counted"][what]) for row in rows])
        found[what] = {"power": slope, "error": error, "counted": expected}
    about = {"start": asdict(MIXTURE if name == "experts" else START), "windows": WINDOWS, "length": LENGTH}
    return {"size": name, "method": method, **about, "rows": rows, "exponents": found, "receipt": receipt}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=list(STEPS), help=", ".join(STEPS))
    parser.add_argument("--again", action="store_true", help="measure what the file has, too")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 17)  # what is freed goes back to the system at once
    multiprocessing.set_forkserver_preload(["cost_growth"])
    for size in options.sizes:
        for method in METHODS:
            name = f"{size} {method}"
            if options.again or name not in known(FILE):
                keep_row(FILE, {"name": name, **grow(size, method)})


if __name__ == "__main__":
    main()
