"""One row: a model's prefill or decoding, timed, with its memory, its work and its limits."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trisect.bench.ceilings import Ceilings
from trisect.bench.decoding import cache_bytes, stepper
from trisect.bench.rows import Case
from trisect.bench.slices import first_layers, missing_bytes, whole_from
from trisect.bench.timing import Lapping, PeakMemory, summary
from trisect.bench.variants import Variant
from trisect.bench.work import head_parameters, kv_bytes, model_flops, parameter_bytes, read_bytes, step_bytes
from trisect.errors import TrisectError
from trisect.plan import budget_of

WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How often to measure."""

    repeats: int = 10
    """Prefills."""
    steps: int | None = None
    """Decoding steps, from the middle of the new tokens; None for all of them."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.repeats < 1 or (self.steps is not None and self.steps < 1):
            raise TrisectError("Repeats and steps are whole numbers of at least 1.")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What running a model showed."""

    times: dict[str, float]
    count: int
    peak_memory: int | None
    cache_bytes: int


def measure(
    model: Any, variant: Variant, case: Case, *, effort: Effort, ceilings: Ceilings, lap: Lapping
) -> dict[str, Any]:
    """A row's measurements: seconds are those of one prefill, or of one decoding step."""
    runner = _prefill if case.phase == "prefill" else _decode
    run = runner(model, case, effort, lap)
    missing = 0
    if case.layers < case.of_layers:
        missing = missing_bytes(model, variant.shape, measured=case.layers)
        run = _extrapolated(model, case, run, missing, lambda: runner(model, case, effort, lap))
    tokens = case.batch * (case.length if case.phase == "prefill" else 1)
    return {
        "removed": variant.removed,
        "extrapolated": case.layers < case.of_layers,
        "tokens_per_second": tokens / run.times["p50"],
        **asdict(run),
        "parameter_bytes": parameter_bytes(model) + missing,
        "kv_bytes_per_token": budget_of(variant.shape).kv_bytes_per_token,
        **_work(variant, case, ceilings, weights=read_bytes(model) + missing, head=head_parameters(model)),
    }


def _work(variant: Variant, case: Case, ceilings: Ceilings, *, weights: int, head: int) -> dict[str, Any]:
    """FLOPs and bytes of one prefill, or of one step with the mean context, and the least time for them."""
    shape, batch = variant.shape, case.batch
    if case.phase == "prefill":
        flops = model_flops(shape, batch=batch, tokens=case.length, context=case.length, head=head)
        moved = weights + kv_bytes(shape, batch=batch, context=case.length)
    else:
        context = case.length + case.new / 2
        flops = model_flops(shape, batch=batch, tokens=1, context=round(context), head=head)
        moved = step_bytes(shape, weights=weights, batch=batch, context=context)
    return {
        "flops": {**vars(flops), "layers": flops.layers, "total": flops.total},
        "bytes": moved,
        "floor_seconds": ceilings.floor(flops=flops.total, moved=moved),
    }


def _prefill(model: Any, case: Case, effort: Effort, lap: Lapping) -> Run:
    ids = random_tokens(model, case, effort.seed)
    forward = torch.compile(model, dynamic=False) if case.mode == "compile" else model

    @torch.no_grad()
    def once() -> Any:
        # As `generate` does it: the cache is filled, and logits are made for the last token alone.
        return forward(input_ids=ids, use_cache=True, logits_to_keep=1)

    held = cache_bytes(once().past_key_values)
    lap(once, WARM_UP)
    peak = PeakMemory(_device(ids))
    laps = lap(once, effort.repeats)
    return Run(times=summary(laps), count=len(laps.seconds), peak_memory=peak.bytes(), cache_bytes=held)


def _decode(model: Any, case: Case, effort: Effort, lap: Lapping) -> Run:
    ids = random_tokens(model, case, effort.seed)
    decoder = stepper(model, ids, new=case.new, mode=case.mode, stock=case.kind == "dense")
    try:
        decoder.start()
        steps = min(effort.steps or case.new, case.new)
        decoder.seek((case.new - steps) // 2)
        peak = PeakMemory(_device(ids))
        laps = lap(decoder.step, steps)
        return Run(
            times={**summary(laps), "mean": laps.mean},
            count=steps,
            peak_memory=peak.bytes(),
            cache_bytes=decoder.cache_bytes(),
        )
    finally:
        decoder.close()


def _extrapolated(model: Any, case: Case, many: Run, missing: int, again: Callable[[], Run]) -> Run:
    """The whole model's run from that of a slice and that of one layer."""
    with first_layers(model, 1):
        one = again()
    sizes = {"measured": case.layers, "layers": case.of_layers}
    median = whole_from(many.times["p50"], one.times["p50"], **sizes)
    held = many.cache_bytes - one.cache_bytes
    cached = round(many.cache_bytes + (case.of_layers - case.layers) * held / (case.layers - 1))
    peak = many.peak_memory
    return replace(
        many,
        # Only medians are steady enough to go by; the others keep their distance from it.
        times={name: median * value / many.times["p50"] for name, value in many.times.items()},
        peak_memory=None if peak is None else peak + missing + cached - many.cache_bytes,
        cache_bytes=cached,
    )


def random_tokens(model: Any, case: Case, seed: int) -> Tensor:
    """A prompt of random tokens, the same for every variant."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = torch.randint(0, vocabulary, (case.batch, case.length), generator=generator)
    return ids.to(next(model.parameters()).device)


def _device(ids: Tensor) -> str:
    return str(ids.device)
