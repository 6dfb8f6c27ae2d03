"""What the bench tests share: tiny subjects, and a clock that counts FLOPs instead of waiting."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from random_models import Subject, variants_of
from sweeps import Rows, Tally, run_sweep
from torch.utils.flop_counter import FlopCounterMode

from tiny_models import CONFIGS
from trisect.bench.measure import Ceilings, Effort
from trisect.bench.rows import Variant
from trisect.bench.sweep import Sweep

CEILINGS = Ceilings(flops=1e9, copy_bytes=1e9, read_bytes=1e8, matrix=1)
KINDS = ("dense", "owned", "trisect", "svd-llm")
FAMILIES = ("llama-gqa", "llama-mha", "qwen3", "phi3", "mpt", "gpt2", "opt", "gpt_neox")


def subject(name: str, **settings: Any) -> Subject:
    """A tiny model of a family."""
    config = CONFIGS[name]()
    for key, value in settings.items():
        setattr(config, key, value)
    return Subject(name=name, config=config)


def tiny_variants(given: Subject, kinds: Sequence[str] = KINDS, **settings: Any) -> list[Variant]:
    dense = given.dense_shape(torch.float32)
    return variants_of(dense, kinds=kinds, **{"ratios": (0.4,), "align": None, **settings})


def flop_laps(work: Callable[[], object], count: int) -> list[float]:
    """Every lap "takes" as many seconds as a profiler counts FLOPs: the same on every machine."""
    with FlopCounterMode(display=False) as counter:
        work()
    return [float(counter.get_total_flops())] * count


def measured(
    given: Subject, variants: Sequence[Variant], rows: Rows | None = None, **settings: Any
) -> tuple[Rows, Tally]:
    """A small sweep timed in FLOPs."""
    rows = Rows() if rows is None else rows
    sweep = Sweep(**{"lengths": (12,), "batches": (2,), "new": 4, "attentions": ("eager",), **settings})
    effort = Effort(repeats=2)
    tally = run_sweep(given, variants, sweep, rows, effort=effort, ceilings=CEILINGS, lap=flop_laps)
    return rows, tally
