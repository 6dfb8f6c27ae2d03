"""Kill a compression again and again at random moments, let it go on, and compare the bytes at the end.

    python experiments/kill_and_resume.py --kills 50

The processes are forked from this one, so that a kill may come at any moment of the work and not only while
Python is still importing things.
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import torch

from trisect.cli import main
from trisect.support.files import write_json
from trisect.support.receipt import build_receipt

ROOT = Path(__file__).resolve().parents[1]
ASSETS = Path(os.path.relpath(os.environ.get("TRISECT_ASSETS") or ROOT.parent / "shared"))
RESULT = ROOT / "experiments" / "results" / "kill-and-resume.json"
UNEQUAL_BY_NATURE = ("receipt.json", "README.md")
"""Hold the date and the seconds a run took."""


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name not in UNEQUAL_BY_NATURE
    }


def start(arguments: list[str]) -> int:
    child = os.fork()
    if child == 0:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            code = main(arguments)
        os._exit(code)
    return child


def finish(arguments: list[str]) -> float:
    began = time.perf_counter()
    _, status = os.waitpid(start(arguments), 0)
    if status != 0:
        raise SystemExit(f"a run that nobody killed ended with {status}")
    return time.perf_counter() - began


def killed(arguments: list[str], after: float) -> bool:
    """Whether the run was still going on when it was killed."""
    child = start(arguments)
    time.sleep(after)
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        return False
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--method", default="a3+")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        common = [
            *("compress", str(ASSETS / "models" / "stories15m"), "--ratio", "0.25"),
            *("--method", options.method, "--sampling", "first"),
            *("--calibration", str(ASSETS / "data" / "tinystories" / "tinystories.txt")),
            *("--samples", "16", "--length", "128", "--eval", "none", "--dtype", "float32", "--quiet"),
        ]
        seconds = finish([*common, "-o", str(home / "undisturbed" / "model")])
        expected = digests(home / "undisturbed" / "model")
        kills, layers, equal = 0, [], 0
        while kills < options.kills:
            out = home / "killed" / "model"
            if killed([*common, "-o", str(out)], chance.uniform(0, seconds)):
                kills += 1
                work = home / "killed" / "model.unfinished"
                layers.append(len(list(work.glob("layer-*"))))
            if out.exists():  # killed between naming the result and removing what it was made from
                shutil.rmtree(out.parent / "model.unfinished", ignore_errors=True)
            else:
                finish([*common, "-o", str(out)])
            left = sorted(path.name for path in out.parent.iterdir())
            found = digests(out)
            unequal = [name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]
            if unequal or left != ["model"]:
                raise SystemExit(f"after kill {kills} these differ: {unequal}; these are there: {left}")
            equal += 1
            shutil.rmtree(out)
    recipe = {"command": "compress", "arguments": common[2:], "kills": options.kills}
    receipt = build_receipt(recipe, seed=options.seed, token_hash=None, timings={"undisturbed": seconds})
    found = {"kills": kills, "byte_identical": equal, "layers_finished_when_killed": layers}
    write_json(RESULT, {**found, "files_compared": sorted(expected), "receipt": receipt})
    print(f"{kills} kills, {equal} results byte-identical; layers finished when killed: {sorted(layers)}")


if __name__ == "__main__":
    run()
