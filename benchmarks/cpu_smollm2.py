"""SmolLM2-135M at 25% on two CPU threads: the receipt experiments/results/bench-cpu-smollm2.json.

    .venv/bin/python benchmarks/cpu_smollm2.py

Wants a quiet machine: nothing else on its cores while it runs, for about six minutes. Every row is measured
in several rounds, all rows in each, and the median round counts: a machine that is shared is not equally fast
all the time.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

THREADS = 2
os.environ["OMP_NUM_THREADS"] = str(THREADS)  # read when torch is loaded

import torch  # noqa: E402
from random_models import subject_of_model, variants_of  # noqa: E402
from sweeps import Rows, run_sweep  # noqa: E402

from trisect.bench import rows as tables  # noqa: E402
from trisect.bench.measure import Effort  # noqa: E402
from trisect.bench.rows import PHASES, failures, notes_for, related  # noqa: E402
from trisect.bench.sweep import Sweep  # noqa: E402
from trisect.support.files import write_json  # noqa: E402

RESULTS = Path(__file__).resolve().parents[1] / "experiments" / "results"
RECEIPT = RESULTS / "bench-cpu-smollm2.json"
KINDS = ("dense", "owned", "trisect", "svd-llm")
ROUNDS = 5


def main(
    path: Path = RECEIPT, *, length: int = 1024, new: int = 128, layers: int | None = None, rounds: int = ROUNDS
) -> int:
    torch.set_num_threads(THREADS)
    rows = Rows.open(path)
    if not rows.rows:
        sweep = Sweep(lengths=(length,), new=new, layers=layers)
        rows = measured([sweep] * rounds)
        # With what each row is beside the dense one: that is what the receipt is for.
        write_json(path, {**rows.to_dict(), "rows": related(rows.rows), "notes": notes_for(rows.rows)})
    for phase in PHASES:
        print(f"\n{phase}\n\n{tables.markdown(*tables.cells(rows.rows, phase, tables.SPEED))}")
    return 1 if failures(rows.rows) else 0


def measured(rounds: list[Sweep]) -> Rows:
    subject = subject_of_model("smollm2-135m")
    variants = variants_of(subject.dense_shape(torch.float32), kinds=KINDS, ratios=(0.25,))
    found = []
    for number, sweep in enumerate(rounds, 1):
        print(f"round {number} of {len(rounds)}", flush=True)
        found.append(Rows())
        run_sweep(subject, variants, sweep, found[-1], effort=Effort(repeats=3), say=print)
    return replace(found[0], rows=median_rows([each.rows for each in found]))


def median_rows(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of every case, the row whose time is the median of all rounds, with the times of all of them."""
    found = []
    for same in zip(*rounds, strict=True):
        assert all(row["case"] == same[0]["case"] for row in same)
        ordered = sorted(same, key=lambda row: row.get("times", {}).get("p50", 0.0))
        times = [row["times"]["p50"] for row in ordered if "times" in row]
        found.append({**ordered[len(ordered) // 2], "p50_of_rounds": times})
    return found


if __name__ == "__main__":
    sys.exit(main())
