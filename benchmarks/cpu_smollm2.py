"""SmolLM2-135M at 25% on two CPU threads: the receipt experiments/results/bench-cpu-smollm2.

    .venv/bin/python benchmarks/cpu_smollm2.py

Wants a quiet machine: nothing else on its cores while it runs, for about three minutes.
"""

import os
import sys
from pathlib import Path

THREADS = 2
os.environ["OMP_NUM_THREADS"] = str(THREADS)  # read when torch is loaded

import torch  # noqa: E402

from trisect.bench.measure import Effort  # noqa: E402
from trisect.bench.relate import failures, related  # noqa: E402
from trisect.bench.rows import PHASES, Rows  # noqa: E402
from trisect.bench.run import Sweep, run_sweep  # noqa: E402
from trisect.bench.subject import subject_of_model  # noqa: E402
from trisect.bench.table import SPEED, cells, markdown, notes_for  # noqa: E402
from trisect.bench.variants import variants_of  # noqa: E402
from trisect.files import write_json  # noqa: E402

RESULTS = Path(__file__).resolve().parents[1] / "experiments" / "results"
RECEIPT = RESULTS / "bench-cpu-smollm2" / "rows.json"
KINDS = ("dense", "owned", "trisect", "svd-llm")


def main(path: Path = RECEIPT, *, length: int = 1024, new: int = 128, layers: int | None = None) -> int:
    torch.set_num_threads(THREADS)
    subject = subject_of_model("smollm2-135m")
    variants = variants_of(subject.dense_shape(torch.float32), kinds=KINDS, ratios=(0.25,))
    rows = Rows.open(path)
    sweep = Sweep(lengths=(length,), new=new, layers=layers)
    run_sweep(subject, variants, sweep, rows, effort=Effort(repeats=9), say=print)
    # With what each row is beside the dense one: that is what the receipt is for.
    write_json(path, {**rows.to_dict(), "rows": related(rows.rows), "notes": notes_for(rows.rows)})
    for phase in PHASES:
        print(f"\n{phase}\n\n{markdown(*cells(rows.rows, phase, SPEED))}")
    return 1 if failures(rows.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
