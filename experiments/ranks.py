"""One, two and four processes on one machine, and two "machines" at two loopback addresses: one model.

    python experiments/ranks.py

Every process has one thread. Wants a quiet machine. What the results have in common is measured on logits:
bases may turn by rounding, and the model is the same all the same.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from kill_and_resume import ASSETS, ROOT, digests

from trisect.models import load_model
from trisect.support.files import write_json
from trisect.support.receipt import build_receipt

RESULT = ROOT / "experiments" / "results" / "ranks.json"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ONE_NODE = ["--standalone", "--local-addr", "127.0.0.1"]
NODES = ("127.0.0.2", "127.0.0.3")


def command(method: str) -> list[str]:
    return [
        *("-m", "trisect", "compress", str(ASSETS / "models" / "stories15m"), "--ratio", "0.25"),
        *("--method", method, "--allocate", "uniform", "--sampling", "first", "--device", "cpu"),
        *("--calibration", str(ASSETS / "data" / "tinystories" / "tinystories.txt")),
        *("--samples", "128", "--length", "256", "--eval", "none", "--dtype", "float32", "--quiet"),
    ]


def on_one_node(processes: int, method: str, out: Path) -> None:
    words = [*TORCHRUN, *ONE_NODE, "--nproc-per-node", str(processes), *command(method), "-o", str(out)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def on_two_nodes(method: str, out: Path) -> None:
    """The command of docs/scale.md, each node at a network address of its own."""
    with socket.socket() as probe:
        probe.bind((NODES[0], 0))
        port = probe.getsockname()[1]
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", NODES[0], "--master-port", str(port)]
    running = []
    for number, address in enumerate(NODES):
        words = [*TORCHRUN, *meet, "--node-rank", str(number), "--local-addr", address]
        running.append(subprocess.Popen([*words, *command(method), "-o", str(out)], stdout=subprocess.DEVNULL))
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit(f"two nodes ended with {codes}")


def logits(folder: Path) -> torch.Tensor:
    ids = torch.arange(3, 259).unsqueeze(0)
    with torch.no_grad():
        found: torch.Tensor = load_model(str(folder), dtype="float32").model(input_ids=ids).logits
    return found


def measured(method: str, home: Path) -> dict[str, Any]:
    rows, expected = [], None
    for processes in (1, 2, 4):
        out = home / f"{method}-{processes}"
        on_one_node(processes, method, out)
        timings = json.loads((out / "receipt.json").read_text())["timings"]
        found = logits(out)
        expected = found if expected is None else expected
        rows.append(
            {
                "processes": processes,
                "seconds": timings,
                "largest_logit_difference": (found - expected).abs().max().item(),
                "largest_logit": expected.abs().max().item(),
            }
        )
        print(method, rows[-1], flush=True)
    on_two_nodes(method, home / f"{method}-nodes")
    same = digests(home / f"{method}-nodes") == digests(home / f"{method}-2")
    print(f"{method}: two nodes and two processes on one gave the same bytes: {same}", flush=True)
    return {"one_node": rows, "two_nodes_give_the_bytes_of_two_processes": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=["a3", "a3+"])
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        found = {method: measured(method, Path(folder)) for method in options.methods}
    recipe = {"command": [word for word in command("METHOD")[2:] if not Path(word).exists()]}
    recipe["cores"] = os.cpu_count()
    receipt = build_receipt(recipe, seed=0, token_hash=None, timings={})
    write_json(RESULT, {"methods": found, "receipt": receipt})


if __name__ == "__main__":
    main()
