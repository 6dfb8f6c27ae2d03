"""What is measured of the real models on a GPU, by several processes at once: one leaves most of it idle.

    python experiments/on_gpu.py                              # every job below that is not done
    python experiments/on_gpu.py main pieces --workers 4 --seconds 500
    nvidia-cuda-mps-control -d                                # before it: work of processes then overlaps

Processes share recipes cell by cell and sections of a3plus_protocol.py row by row; each is run once, and a
second run goes on. Nothing that is timed belongs here. After `--seconds` nothing new is begun. Loss curves
are measured once, by whoever comes first, unless runs/a3plus-curves.json has them.
"""

import argparse
import functools
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from texts import HALVES, split_stories
from trust import share_memory

from trisect.compare import Folder, load_recipe, run_recipe, runner
from trisect.compare.recipe import cells_of
from trisect.plan import read_curves

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
SMOLLM2 = "SmolLM2-135M"
LAST_CELL = 45
"""Seconds before the end after which nothing is begun."""

Job = Callable[["Worker"], Any]


class Worker:
    """One process: its share of the memory, and how long there is."""

    def __init__(self, number: int, given: argparse.Namespace):
        self.number, self.device, self.end = number, given.device, given.end
        if torch.device(self.device).type == "cuda":
            share_memory(given.workers)
        torch.set_float32_matmul_precision("high" if given.tf32 else "highest")
        runner.load_model = functools.cache(runner.load_model)  # type: ignore[attr-defined]
        Folder.claimed = _until(Folder.claimed, self.late)  # type: ignore[method-assign]

    def late(self) -> bool:
        return time.time() > self.end - LAST_CELL

    def say(self, text: str) -> None:
        print(f"[{self.number}, {self.end - time.time():.0f} s left] {text}", flush=True)


def recipe(name: str, model: str = SMOLLM2, *methods: str) -> Job:
    """The cells of a recipe that are about one model, and methods."""

    def run(worker: Worker) -> None:
        loaded = load_recipe(ROOT / "experiments" / "recipes" / f"{name}.yaml")
        folder = Folder(path=RESULTS / name)
        if model == SMOLLM2:
            give_curves(loaded, folder, worker)
        tally = run_recipe(
            loaded, folder, device=worker.device, only=[model, *methods], keep_errors=True, say=worker.say
        )
        worker.say(f"{name}, {model}: {len(tally.ran)} run, {len(tally.failed)} failed")

    return run


def give_curves(loaded: Any, folder: Folder, worker: Worker) -> None:
    """Put the stored loss curves where the recipe looks for them, if they are of its model and tokens."""
    stored = ROOT / "runs" / "a3plus-curves.json"
    if not stored.exists():
        return
    curves = read_curves(stored)
    for cell in cells_of(loaded):
        if cell.model.name == SMOLLM2 and cell.config is not None and cell.config.allocate == "balanced":
            folder.prepare()
            run = runner.ModelRun(loaded, cell.model, folder=folder, device=worker.device, say=worker.say)
            path = run.curves_path(cell.config, cell.calibration)
            mine = run.fingerprint, run.tokens(cell.calibration).hash
            if (curves.fingerprint, curves.token_hash) == mine and not path.exists():
                shutil.copy(stored, path)
            return


def section(name: str) -> Job:
    """A section of a3plus_protocol.py."""

    def run(worker: Worker) -> None:
        import a3plus_protocol

        protocol = a3plus_protocol.Protocol(name, device=worker.device, out=RESULTS)
        protocol.run(seconds=worker.end - LAST_CELL - time.time())

    return run


def script(*command: str) -> Job:
    """Another experiment, by one process alone."""

    def run(worker: Worker) -> None:
        locks = Folder(path=ROOT / "runs" / "on-gpu")
        locks.prepare()
        with locks.claimed("-".join(command)) as mine:
            if mine:
                words = [sys.executable, str(ROOT / "experiments" / command[0]), *command[1:]]
                subprocess.run([*words, "--device", worker.device], check=True)

    return run


JOBS: dict[str, tuple[Job, ...]] = {
    "main": (recipe("main-smollm2", SMOLLM2, "svd", "fwsvd", "svd-llm", "svd-llm-v2", "a3"),),
    "main-asvd": (recipe("main-smollm2", SMOLLM2, "asvd"),),
    "study": (recipe("calibration-study"),),
    "scopes": (section("scopes"),),
    "tasks": (script("zero_shot.py", "answer"),),
    "synthetic": (section("synthetic"), section("synthetic-alone")),
    "quantise": (script("quantise_pareto.py", "smollm2"),),
    "finetune": (script("finetune_smollm2.py", "smollm2-37.5"),),
    "ablations": tuple(recipe(f"ablation-{part}") for part in ("qk", "ov", "mlp")),
    "diagnostic": (recipe("diagnostic"),),
    "uniform": (section("uniform"),),
    "pieces": (recipe("pieces"),),
    "main-mpt": (recipe("main-stories-mpt", "stories-mpt-20m"),),
    "pieces-mpt": (recipe("pieces", "stories-mpt-20m"),),
    "pieces-15m": (recipe("pieces", "stories15m"),),
}


def work(given: argparse.Namespace) -> None:
    """What one process does: job after job, each where it finds something to do."""
    worker = Worker(given.worker, given)
    names = given.jobs or list(JOBS)
    start = given.worker % len(names)  # not all at the same job, or they would wait for each other's loading
    for name in names[start:] + names[:start]:
        for job in JOBS[name]:
            if worker.late():
                return
            try:
                job(worker)
            except Exception:  # the other jobs are worth having
                traceback.print_exc()


def _until(claimed: Any, late: Callable[[], bool]) -> Any:
    @contextmanager
    def claim(folder: Folder, key: str) -> Iterator[bool]:
        if late():
            yield False
        else:
            with claimed(folder, key) as mine:
                yield mine

    return claim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=", ".join(JOBS))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tf32", action="store_true", help="faster products, and receipts that say so")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := [name for name in given.jobs if name not in JOBS]:
        parser.error(f"unknown job {unknown[0]!r}; known: {', '.join(JOBS)}")
    if given.worker is not None:
        work(given)
        return
    if not all(path.exists() for path in HALVES):
        split_stories()
    end = time.time() + given.seconds
    words = [sys.executable, __file__, *sys.argv[1:], "--end", str(end), "--worker"]
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // given.workers))}
    running = [
        subprocess.Popen([*words, str(number)], env={**os.environ, **threads}) for number in range(given.workers)
    ]
    sys.exit(max(process.wait() for process in running))


if __name__ == "__main__":
    main()
