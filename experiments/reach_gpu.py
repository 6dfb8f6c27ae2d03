"""What is measured of mixtures and of gemma on a GPU: jobs side by side, each a process with a log and a time limit.

    python experiments/reach_gpu.py stage                                  # at home: runs/reach, and what to carry
    python experiments/reach_gpu.py tests experts --seconds 300
    python experiments/reach_gpu.py gemma --seconds 560
    python experiments/reach_gpu.py shapes --seconds 560                   # timed, so alone

The GPU's machine has no network: `stage` lays texts, stories-moe-22m, gemma in pieces and the package gguf into
runs/reach, which is TRISECT_ASSETS there. Logs and receipts go to the folder $OUT, or to runs/reach-out.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tables import RESULTS, ROOT

STAGE = ROOT / "runs" / "reach"
PIECE = 52_000_000
"""Bytes: with the working tree less than what one call carries."""
DATA = (
    *("wikitext-2/valid.txt", "wikitext-2/test.txt", "c4/c4.txt", "c4/c4_demo.jsonl", "wikipedia/wiki.txt"),
    *("tinystories/tinystories.txt", "alpaca/alpaca_en_demo.json"),
)
JOBS = {
    "tests": [
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "tests/kernels",
        "tests/test_devices_agree.py",
        "tests/test_synthetic.py",
    ],
    "experts": ["experiments/experts.py", "--all"],
    "gemma": ["experiments/trust.py", "accuracy", "--model", "gemma-3-270m"],
    # 64 windows: with fewer, gpt-oss has too few tokens for a3+ to refit W_up and W_gate.
    "shapes": ["experiments/scale_shapes.py", "--samples", "64", "--speed"]
    + ["30b-a3b-a3", "30b-a3b-a3+", "gpt-oss-20b-a3", "gpt-oss-20b-a3+"],
}
RECEIPTS = ("experts.json", "accuracy.json", "scale-shapes.json")


def stage() -> None:
    """Everything that has to be carried, in folders of one call each."""
    import gguf
    from gemma import NAME, TOKENIZER, find_gemma, load_gemma
    from texts import ASSETS

    os.chdir(ROOT)
    for name in DATA:
        target = STAGE / "data" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ASSETS / "data" / name, target)
    shutil.copytree(ASSETS / "models/stories-moe-22m", STAGE / "models/stories-moe-22m", dirs_exist_ok=True)
    for folder in Path(gguf.__file__).parents[1].glob("gguf*"):  # its metadata too: transformers asks for the version
        unread = shutil.ignore_patterns("__pycache__")
        shutil.copytree(folder, STAGE / "packages" / folder.name, dirs_exist_ok=True, ignore=unread)
    folder = STAGE / "models/gemma-3-270m"
    folder.mkdir(exist_ok=True)
    with find_gemma().open("rb") as whole:
        for number, piece in enumerate(iter(lambda: whole.read(PIECE), b"")):
            (folder / f"{NAME}.part{number:02d}").write_bytes(piece)
    with tempfile.TemporaryDirectory() as scratch:
        load_gemma("cpu").tokenizer.save_pretrained(scratch)
        archive = shutil.make_archive(str(folder / TOKENIZER.split(".")[0]), "gztar", scratch)
    calls = [[STAGE / name for name in ("data", "packages", "models/stories-moe-22m")]]
    calls += [[path] for path in sorted(folder.glob(f"{NAME}.part*"))]
    calls[-1].append(Path(archive))  # the last piece is the smallest
    print("Carry, one line a call; a call may run jobs that need none of the rest, tests and shapes:")
    for paths in calls:
        print(f"  {[str(path.relative_to(ROOT)) for path in paths]}")
    print(f"then there: TRISECT_ASSETS={STAGE.relative_to(ROOT)} python3 experiments/reach_gpu.py JOB ...")


def run(names: list[str], *, device: str, seconds: float) -> int:
    """All jobs at once; how many failed or were stopped."""
    out = Path(os.environ.get("OUT") or ROOT / "runs" / "reach-out")
    out.mkdir(parents=True, exist_ok=True)
    paths = ["src", "experiments", os.environ.get("PYTHONPATH", ""), str(STAGE / "packages")]
    settings = {"PYTHONPATH": ":".join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    settings["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // len(names)))
    running, began = {}, time.monotonic()
    for name in names:
        words = [sys.executable, *JOBS[name], *(() if name == "tests" else ("--device", device))]
        with (out / f"{name}.log").open("w") as log:
            running[name] = subprocess.Popen(
                words, cwd=ROOT, env={**os.environ, **settings}, stdout=log, stderr=subprocess.STDOUT
            )
    failed = 0
    for name, process in running.items():
        try:
            code: int | str = process.wait(max(1.0, began + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = "out of time"
        failed += code != 0
        lines = (out / f"{name}.log").read_text(errors="replace").splitlines()
        print(f"== {name}: {code}, {time.monotonic() - began:.0f} s", *lines[-12:], sep="\n", flush=True)
        for receipt in RECEIPTS:
            if (RESULTS / receipt).exists():
                shutil.copyfile(RESULTS / receipt, out / receipt)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", choices=["stage", *JOBS], metavar="JOB", help=f"stage, or {', '.join(JOBS)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=560)
    given = parser.parse_args()
    if given.jobs == ["stage"]:
        stage()
    else:
        sys.exit(run(given.jobs, device=given.device, seconds=given.seconds))


if __name__ == "__main__":
    main()
