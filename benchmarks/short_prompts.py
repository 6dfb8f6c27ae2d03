"""Short prompts, dense and narrow models in turn: what takes its time is the host, and its pace drifts.

    python benchmarks/short_prompts.py --device cuda --json experiments/results/short-prompts.json
    python benchmarks/short_prompts.py --device cpu --tiny            # two small layers, to try the script

A fast GPU is done with a short prompt as soon as the host has launched it, and a host is not equally fast all
the time: models that are measured one after the other do not compare. Here all are in memory at once, and a
lap is a prefill by each of them; on a GPU our runtime's models read it once more in a Decoder, which replays a
CUDA graph ("replayed"). Laps go there and back, as a model that always came later would always meet
the slower host of a drift. Every lap has its own ratio to the dense model, and the median of those counts.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from random_models import Subject, build, subject_of_shape, variants_of
from sweeps import use_attention

from trisect.bench.measure import WARM_UP, device_name, is_cuda, random_tokens
from trisect.bench.rows import Case, Variant, markdown
from trisect.bench.sweep import Sweep, cases_of
from trisect.decode import Decoder
from trisect.models.checkpoint import DTYPES
from trisect.support.files import write_json
from trisect.support.receipt import build_receipt

SHAPE = "llama-3.2-3b"
TINY = {"hidden_size": 64, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"head_dim": 80, "vocab_size": 50}
SIZES, TINY_SIZES = ((1, 1024), (1, 2048), (4, 1024)), ((1, 16), (2, 16))
"""Batch and length of prompts."""
KINDS, RATIOS = ("dense", "owned", "trisect"), (0.2, 0.4)
ATTENTION = "sdpa"
LAPS = 20
SEED = 0

Model = tuple[str, str]
"""Its kind and the ratio that was asked for, which is empty for dense ones."""
Work = Callable[[], object]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Times:
    """Seconds of one model, lap by lap."""

    done: list[float] = field(default_factory=list)
    """Until the device had nothing left to do."""
    launched: list[float] = field(default_factory=list)
    """Until the host was through."""


@dataclass(frozen=True, kw_only=True)
class Stand:
    """Where models are measured, how often, and by which clock."""

    subject: Subject
    device: str
    dtype: str
    laps: int
    clock: Clock
    settle: Work
    """Waits until the device has done everything."""

    def sweep(self, batch: int, length: int) -> Sweep:
        """One size of prompts."""
        return Sweep(
            phases=("prefill",),
            batches=(batch,),
            lengths=(length,),
            attentions=(ATTENTION,),
            device=self.device,
            dtype=self.dtype,
        )


def main(arguments: Sequence[str] | None = None, *, clock: Clock = time.perf_counter) -> None:
    given = _arguments(arguments)
    started, stand = time.perf_counter(), _stand(given, clock)
    sizes = TINY_SIZES if given.tiny else SIZES
    sweeps = [stand.sweep(batch, length) for batch, length in sizes]  # refuses a device that is not there
    models = built(stand)
    timings = {"build": time.perf_counter() - started}
    rows: list[dict[str, Any]] = []
    for sweep in sweeps:
        rows += measured(stand, models, sweep)
        timings["total"] = time.perf_counter() - started
        if given.json:
            recipe = _recipe(stand, tiny=given.tiny)
            receipt = build_receipt(recipe, seed=SEED, token_hash=None, timings=timings)
            write_json(given.json, {"rows": rows, "receipt": receipt})
        print(f"{rows[-1]['batch']} x {rows[-1]['length']}: {timings['total']:.1f} s", flush=True)
    print(f"\n{shown(rows)}")


def built(stand: Stand) -> list[tuple[Variant, Any]]:
    """Every model, all of them on the device; the dense one is the first."""
    dtype, models = DTYPES[stand.dtype], []
    for variant in variants_of(stand.subject.dense_shape(dtype), kinds=KINDS, ratios=RATIOS):
        model = build(stand.subject, variant, device=stand.device, dtype=dtype, seed=SEED)
        use_attention(model, ATTENTION)
        models.append((variant, model))
    return models


def measured(stand: Stand, models: Sequence[tuple[Variant, Any]], sweep: Sweep) -> list[dict[str, Any]]:
    """A row for every model, with prompts of one size."""
    rows: dict[Model, tuple[Case, Variant]] = {}
    works: dict[Model, Work] = {}
    for variant, model in models:
        case = next(cases_of(stand.subject.name, variant, sweep))
        ids = random_tokens(model, case, SEED)
        ways = {case.kind: prefill(model, ids)}
        if is_cuda(stand.device) and case.kind != "dense" and (again := replayed(model, ids)) is not None:
            ways[f"{case.kind} replayed"] = again
        works |= {(kind, case.asked): work for kind, work in ways.items()}
        rows |= {(kind, case.asked): (case, variant) for kind in ways}
    laps_in_turn(works, WARM_UP, clock=stand.clock, settle=stand.settle)
    times = laps_in_turn(works, stand.laps, clock=stand.clock, settle=stand.settle)
    return [
        {
            "name": case.subject,
            "batch": case.batch,
            "length": case.length,
            "kind": kind,
            "asked": case.asked,
            "widths": case.widths,
            "removed": variant.removed,
            **compared(times[kind, case.asked], times["dense", ""]),
        }
        for (kind, _), (case, variant) in rows.items()
    ]


def prefill(model: Any, ids: torch.Tensor) -> Work:
    """As `generate` does it: the cache is filled, and logits are made for the last token alone."""

    def once() -> None:
        # Nothing is given back, so that every model's cache is free again when the next one begins.
        with torch.inference_mode():
            model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return once


def replayed(model: Any, ids: torch.Tensor) -> Work | None:
    """The same in a Decoder, which records a prompt when its length comes again; None for one that it does not."""
    decoder = Decoder(model, batch=ids.shape[0], max_length=ids.shape[1] + 1, mode="graphs")
    for _ in range(2):
        decoder.prefill(ids)
    return (lambda: decoder.prefill(ids)) if any(decoder._prompts.values()) else None


def laps_in_turn(works: Mapping[Model, Work], count: int, *, clock: Clock, settle: Work) -> dict[Model, Times]:
    """Every work once a lap, each between two moments when the device has nothing to do."""
    found = {name: Times() for name in works}
    for lap in range(count):
        for name in list(works)[:: -1 if lap % 2 else 1]:
            settle()
            start = clock()
            works[name]()
            launched = clock()
            settle()
            found[name].done.append(clock() - start)
            found[name].launched.append(launched - start)
    return found


def compared(own: Times, dense: Times) -> dict[str, Any]:
    """Medians and their ratio to the dense model's, and that of laps, which a drift hardly gets into."""
    seconds = median(own.done)
    paired = [a / b for a, b in zip(own.done, dense.done, strict=True)]
    low, middle, high = (float(np.percentile(paired, percent)) for percent in (10, 50, 90))
    return {
        "seconds": seconds,
        "launched_seconds": median(own.launched),
        "against_dense": seconds / median(dense.done),
        "paired": middle,
        "paired_p10": low,
        "paired_p90": high,
    }


def shown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table for who reads the end of the output."""
    header = ["prompt", "model", "ms", "ms launched", "beside dense", "lap by lap", "p10 to p90"]
    lines = [
        [f"{row['batch']} x {row['length']}", f"{row['kind']} {row['asked']}".rstrip()]
        + [f"{1000 * row[name]:.2f}" for name in ("seconds", "launched_seconds")]
        + [f"{row[name]:.3f}" for name in ("against_dense", "paired")]
        + [f"{row['paired_p10']:.3f} to {row['paired_p90']:.3f}"]
        for row in rows
    ]
    return markdown(header, lines)


def _stand(given: argparse.Namespace, clock: Clock) -> Stand:
    tiny = Subject(name=given.shape, config=transformers.LlamaConfig(**TINY))
    cuda = is_cuda(given.device)
    return Stand(
        subject=tiny if given.tiny else subject_of_shape(given.shape),
        device=given.device,
        dtype="bfloat16" if cuda else "float32",
        laps=given.laps,
        clock=clock,
        settle=partial(torch.cuda.synchronize, given.device) if cuda else _at_once,
    )


def _recipe(stand: Stand, *, tiny: bool) -> dict[str, Any]:
    return {
        "benchmark": "short_prompts",
        "shape": stand.subject.name,
        "tiny": tiny,
        "device": device_name(stand.device),
        "dtype": stand.dtype,
        "attention": ATTENTION,
        "laps": stand.laps,
        "warm_up": WARM_UP,
        "threads": torch.get_num_threads(),
        "weights": "random: right for speed, wrong for accuracy",
    }


def _at_once() -> None:
    """A CPU is done when the call is."""


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default=SHAPE, help="a name in benchmarks/shapes.json")
    parser.add_argument("--laps", type=int, default=LAPS, help="an even number, as they go there and back")
    parser.add_argument("--tiny", action="store_true", help="two small layers, to try the script")
    parser.add_argument("--json", type=Path, help="write rows and a receipt to this file")
    given = parser.parse_args(arguments)
    if given.laps < 1 or given.laps % 2:
        parser.error(f"--laps must be an even number of at least 2, not {given.laps}")
    return given


if __name__ == "__main__":
    main()
