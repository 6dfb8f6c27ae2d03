"""The speed of compressed models on one GPU, section by section; each row is saved when it is measured.

    export PYTORCH_ALLOC_CONF=expandable_segments:True
    PYTHONPATH=src python3 benchmarks/h200.py --out OUT [--budget 480] [SECTION ...]

Sections (all by default, in this order):
    main      llama-2-13b in bfloat16: prefill 2 x 2048, and decoding 1024 + 1024 at batch 1 and 32 with CUDA
              graphs; dense, dense in our runtime, and at 20 / 40 / 60% narrow and factored (SVD-LLM)
    latency   times of components of llama-2-13b over the aligned grid, for --budget latency
    eager     llama-2-13b: prefill 2 x 2048 with eager attention, for the paper's runtime table
    folded    llama-2-13b at 20% with folded rates in place of indices
    figures   the paper's throughput figures: llama-3.2-3b and llama-3.1-8b, batch 1, 4, 8, length 1024, 2048
    compile   llama-2-13b at 20% through torch.compile: four layers, extrapolated, as compiling takes long

Without the first line torch's allocator may give every matrix up to 1 MiB more than it has, which counts as
memory in use.
Needs torch, transformers and accelerate; neither typer nor rich nor matplotlib. Rows go to OUT/rows.json;
where there are none yet, those of experiments/results/bench-h200.json are continued. `experiments/collect.py
--bench OUT` keeps what comes back there. No row is begun once `--budget` seconds are over.
Where a row took the whole process down, go on with --keep-errors.
The rotary kernel has a script of its own, benchmarks/rotary.py.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from random_models import Subject, subject_of_shape, variants_of
from sweeps import Rows, run_sweep

from trisect.bench.latency import Workload, layer_seconds, measure_latency
from trisect.bench.measure import Effort, laps_on
from trisect.bench.rows import PHASES, TABLES, cells, failures, markdown
from trisect.bench.sweep import Sweep
from trisect.models.checkpoint import DTYPES
from trisect.plan import read_latency
from trisect.support.files import write_json

ROWS = "rows.json"
STORED = Path(__file__).resolve().parents[1] / "experiments" / "results" / "bench-h200.json"
SHAPE = "llama-2-13b"
TINY = {"hidden_size": 64, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"head_dim": 80, "vocab_size": 50}
RATIOS = (0.2, 0.4, 0.6)
ALL = ("dense", "owned", "trisect", "svd-llm")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where rows go and how long there is."""

    rows: Rows
    out: Path
    device: str
    dtype: str
    end: float
    steps: int
    keep_errors: bool
    tiny: bool
    """Small sizes: to see on a CPU that the script runs."""

    def say(self, text: str) -> None:
        print(text, flush=True)

    def late(self) -> bool:
        return time.monotonic() > self.end

    def sweep(self, **settings: Any) -> Sweep:
        return Sweep(device=self.device, dtype=self.dtype, **settings)

    def run(self, shape: str, sweeps: Sequence[Sweep], *, kinds: Sequence[str] = ALL, **cut: Any) -> None:
        subject = self.subject(shape)
        variants = variants_of(subject.dense_shape(DTYPES[self.dtype]), kinds=kinds, **cut)
        effort = Effort(repeats=2 if self.tiny else 10, steps=2 if self.tiny else self.steps)
        run_sweep(
            subject,
            variants,
            sweeps,
            self.rows,
            effort=effort,
            keep_errors=self.keep_errors,
            say=self.say,
            stop=self.late,
        )

    def subject(self, shape: str) -> Subject:
        if not self.tiny:
            return subject_of_shape(shape)
        return Subject(name=shape, config=transformers.LlamaConfig(**TINY))

    def prefill(self, **settings: Any) -> Sweep:
        length = 16 if self.tiny else 2048
        chosen = {"batches": (2,), "lengths": (length,), **settings}
        return self.sweep(phases=("prefill",), **chosen)

    def decode(self, **settings: Any) -> Sweep:
        length = 16 if self.tiny else 1024
        modes = ("graphs",) if self.device.startswith("cuda") else ("plain",)
        chosen = {"batches": (1, 32), "lengths": (length,), "new": length, "modes": modes, **settings}
        return self.sweep(phases=("decode",), **chosen)


def main_section(bench: Bench) -> None:
    sweeps = [bench.prefill(), bench.decode()]
    bench.run(SHAPE, sweeps, ratios=RATIOS)
    # The FLOPs of the paper's 40% row are those of the first; ours go to the nearest ones. The second removes
    # about as much as our 60%, with wider heads and a narrower MLP.
    widths = ("32/32/384",) if bench.tiny else ("64/64/8320", "64/64/4864")
    bench.run(SHAPE, sweeps, kinds=("trisect",), widths=widths)


def compile_section(bench: Bench) -> None:
    modes = ("compile",) if bench.device.startswith("cuda") else ("plain",)
    layers = 2 if bench.tiny else 4
    sweeps = [bench.prefill(modes=modes, layers=layers), bench.decode(modes=modes, layers=layers, batches=(1,))]
    bench.run(SHAPE, sweeps, kinds=("dense", "owned", "trisect"), ratios=RATIOS[:1])


def eager_section(bench: Bench) -> None:
    bench.run(SHAPE, [bench.prefill(attentions=("eager",))], kinds=("dense", "trisect"), ratios=RATIOS)


def folded_section(bench: Bench) -> None:
    sweeps = [bench.prefill(), bench.decode(batches=(1,))]
    bench.run(SHAPE, sweeps, kinds=("trisect",), ratios=RATIOS[:1], folded=True)


def figures_section(bench: Bench) -> None:
    """The paper's settings for one H100, without its largest model."""
    batches, lengths = ((1,), (16,)) if bench.tiny else ((1, 4, 8), (1024, 2048))
    for shape in ("llama-3.2-3b", "llama-3.1-8b"):
        sweep = bench.prefill(batches=batches, lengths=lengths, attentions=("eager", "sdpa"))
        bench.run(shape, [sweep], kinds=("dense", "trisect"), ratios=RATIOS[:2])


def latency_section(bench: Bench) -> None:
    path = bench.out / f"latency-{SHAPE}.json"
    shape = bench.subject(SHAPE).dense_shape(DTYPES[bench.dtype])
    workload = Workload(batch=2, length=16 if bench.tiny else 2048)
    table = measure_latency(
        shape,
        workload,
        device=bench.device,
        dtype=DTYPES[bench.dtype],
        lap=laps_on(bench.device),
        repeats=1 if bench.tiny else 20,
        known=read_latency(path) if path.exists() else None,
        save=lambda made: write_json(path, made.to_dict()),
    )
    bench.say(f"{path.name}: a dense layer comes to {1000 * layer_seconds(table, shape.layers[0]):.3f} ms")


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "main": main_section,
    "latency": latency_section,
    "eager": eager_section,
    "folded": folded_section,
    "figures": figures_section,
    "compile": compile_section,
}


def show(rows: Rows) -> None:
    """The tables last: who reads the end of the output has them."""
    for phase in PHASES:
        for name, columns in TABLES.items():
            header, lines = cells(rows.rows, phase, columns)
            if lines:
                print(f"\n{phase}, {name}\n\n{markdown(header, lines)}")
    for row in failures(rows.rows):
        print("failed:", json.dumps(row["case"]), row["error"].splitlines()[0])


def resume(out: Path) -> None:
    """Go on from what was stored, where nothing newer is there."""
    if STORED.exists() and not (out / ROWS).exists():
        out.mkdir(parents=True, exist_ok=True)
        shutil.copy(STORED, out / ROWS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds")
    parser.add_argument("--steps", type=int, default=256, help="decoding steps to time, from the middle")
    parser.add_argument("--keep-errors", action="store_true", help="do not try failed rows again")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a few layers and tokens, to try the script")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}; known: {', '.join(SECTIONS)}")
    path = given.out / ROWS
    if not given.tiny:
        resume(given.out)
    bench = Bench(
        rows=Rows.open(path),
        out=given.out,
        device=given.device,
        dtype="bfloat16" if given.device.startswith("cuda") else "float32",
        end=time.monotonic() + given.budget,
        steps=given.steps,
        keep_errors=given.keep_errors,
        tiny=given.tiny,
    )
    for name in given.sections or SECTIONS:
        if bench.late():
            bench.say(f"no time left for {name}")
            continue
        began = time.monotonic()
        SECTIONS[name](bench)
        bench.say(f"section {name}: {time.monotonic() - began:.1f} s")
    show(bench.rows)
    return 1 if failures(bench.rows.rows) else 0


if __name__ == "__main__":
    print(f"torch {torch.__version__}, {sys.version.split()[0]}", flush=True)
    sys.exit(main())
