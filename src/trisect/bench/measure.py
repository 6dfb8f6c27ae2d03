"""One row: a model's prefill or decoding, timed, with its memory, its work and the limits of the device."""

import gc
import math
import timeit
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import StaticCache

from trisect.bench.rows import Case, Variant
from trisect.config.settings import record
from trisect.decode import Decoder, decoder
from trisect.models import layer_views, linear
from trisect.plan.budget import Flops, budget_of, layer_flops
from trisect.quantize import cache_bytes
from trisect.records.shapes import ModelShape
from trisect.support import receipt

WARM_UP, LAPS = 3, 10

Work = Callable[[], object]
Lapping = Callable[[Work, int], list[float]]
"""Runs work so many times and gives the seconds of each; tests pass one that counts instead of waiting."""


def laps_on(device: str) -> Lapping:
    """The way to time work on a device."""
    return _cuda_laps if is_cuda(device) else lambda work, count: timeit.repeat(work, number=1, repeat=count)


def _cuda_laps(work: Work, count: int) -> list[float]:
    """From the end of one lap to the end of the next, on the device, without waiting in between."""
    # Where the host cannot keep up, the gaps that it leaves are inside: that is what a user waits for.
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) / 1000 for first, second in zip(marks, marks[1:], strict=False)]


def is_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"


def device_name(device: str) -> str:
    """The accelerator's own name, or the processor's with its threads."""
    if is_cuda(device):
        return str(torch.cuda.get_device_name(torch.device(device)))
    return f"{receipt.hardware()['cpu']}, {torch.get_num_threads()} threads"


def release() -> None:
    """Give back what the last model held, before the next one is built."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        # Every captured graph leaves 64 MiB of working space of cuBLAS behind, which is not the next model's.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the device can do at best, per second."""

    flops: float
    copy_bytes: float  # read plus written
    read_bytes: float
    matrix: int  # side of the square product that gave `flops`

    def floor(self, *, flops: float, moved: float) -> float:
        """Seconds below which no version of this much work can run."""
        # Reading weights needs no writes, but a sum may not run at the memory's pace: the faster of both.
        return max(flops / self.flops, moved / max(self.copy_bytes, self.read_bytes))


def measure_ceilings(
    device: str, dtype: torch.dtype, lap: Lapping, *, matrix: int | None = None, size: int | None = None
) -> Ceilings:
    """Rates of a large product (of side `matrix`), and of a copy and a read of `size` bytes."""
    side = matrix or (8192 if is_cuda(device) else 1024)
    size = size or (4 << 30 if is_cuda(device) else 1 << 28)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device).normal_(generator=generator)

    def seconds(work: Work) -> float:
        lap(work, WARM_UP)
        return median(lap(work, LAPS))

    a, b = random(side, side), random(side, side)
    out = torch.empty_like(a)
    product = seconds(lambda: torch.mm(a, b, out=out))
    source = random(size // dtype.itemsize)
    target = torch.empty_like(source)
    copy, read = seconds(lambda: target.copy_(source)), seconds(source.sum)
    return Ceilings(flops=2 * side**3 / product, copy_bytes=2 * size / copy, read_bytes=size / read, matrix=side)


def model_flops(shape: ModelShape, *, batch: int, tokens: int, context: int, head: int = 0) -> Flops:
    """All layers, and logits of one token per sequence by a head of `head` parameters."""
    total = Flops(head=2 * batch * head)
    for layer in shape.layers:
        total += layer_flops(layer, batch=batch, tokens=tokens, context=context)
    return total


def head_parameters(model: Any) -> int:
    """Elements of the matrix that makes logits."""
    head = model.get_output_embeddings()
    return 0 if head is None else math.prod(linear.sizes_of(head))


def parameter_bytes(model: nn.Module) -> int:
    """Weights that have to be held, packed ones too; a shared matrix counts once."""
    packed = [x for module in model.modules() if isinstance(module, linear.QuantizedLinear) for x in module.buffers()]
    return sum(x.nbytes for x in (*model.parameters(), *packed))


def read_bytes(model: Any) -> int:
    """Weights that every step must read: not embedding tables, unless tied to the head, nor experts beyond top-k."""
    head = model.get_output_embeddings()
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    tables.pop(id(getattr(head, "weight", None)), None)
    mixtures = [view.experts for view in layer_views(model) if view.experts is not None]
    idle = sum(parameter_bytes(x.module) * (x.count - x.top_k) // x.count for x in mixtures)
    return parameter_bytes(model) - sum(table.nbytes for table in tables.values()) - idle


@record
class Effort:
    """How often to measure."""

    repeats: int = Field(10, ge=1)  # prefills
    steps: int | None = Field(None, ge=1)  # decoding steps, from the middle of the new tokens; None for all of them
    seed: int = 0


Run = dict[str, Any]  # what running a model showed: `times`, `count`, `peak_memory` and `cache_bytes`
Turns = Generator[None, None, Run]  # a run in pieces, so that others can have theirs in between; gives what it found


def turns_of(model: Any, case: Case, effort: Effort, lap: Lapping, *, turns: int) -> Turns:
    """A run of the case whose laps are taken in so many pieces."""
    return (_prefill if case.phase == "prefill" else _decode)(model, case, effort, partial(_laps_in, turns, lap))


def in_turn(runs: Sequence[Turns]) -> list[Run | Exception]:
    """What runs find, or what went wrong, a piece of each at a time: what slows the machine down slows all of them."""
    found: dict[int, Run | Exception] = {}
    while len(found) < len(runs):
        for number in [n for n in range(len(runs)) if n not in found]:
            try:
                next(runs[number])
            except StopIteration as end:
                found[number] = end.value
            except Exception as error:  # one model that does not fit must not take the others' rows with it
                found[number] = error
    return [found[number] for number in range(len(runs))]


def _laps_in(turns: int, lap: Lapping, work: Work, count: int) -> Generator[None, None, list[float]]:
    seconds: list[float] = []
    for turn in range(1, min(turns, count) + 1):
        yield
        seconds += lap(work, turn * count // min(turns, count) - len(seconds))
    return seconds


def row_of(run: Run, model: Any, variant: Variant, case: Case, ceilings: Ceilings, *, missing: int = 0) -> Run:
    """The measurements of a row; `missing` are bytes of layers that the model lacks and the variant has."""
    shape, batch, head = variant.shape, case.batch, head_parameters(model)
    if case.phase == "prefill":
        tokens, cached = case.length, float(case.length)
        flops = model_flops(shape, batch=batch, tokens=tokens, context=tokens, head=head)
    else:  # a step with the mean context, and one token written
        tokens, cached = 1, case.length + case.new / 2 + 1
        flops = model_flops(shape, batch=batch, tokens=1, context=round(cached - 1), head=head)
    kept = budget_of(shape).kv_bytes_per_token
    moved = read_bytes(model) + missing + round(batch * cached * kept)
    return {
        "removed": variant.removed,
        "extrapolated": case.layers < case.of_layers,
        "tokens_per_second": batch * tokens / run["times"]["p50"],
        **run,
        "parameter_bytes": parameter_bytes(model) + missing,
        "kv_bytes_per_token": kept,
        "flops": {**vars(flops), "layers": flops.layers, "total": flops.total},
        "bytes": moved,
        "floor_seconds": ceilings.floor(flops=flops.total, moved=moved),
    }


Laps = Callable[[Work, int], Generator[None, None, list[float]]]


def _prefill(model: Any, case: Case, effort: Effort, laps: Laps) -> Turns:
    ids = random_tokens(model, case, effort.seed)
    forward = torch.compile(model, dynamic=False) if case.mode == "compile" else model

    @torch.no_grad()
    def once() -> Any:
        # As `generate` does it: the cache is filled, and logits are made for the last token alone.
        return forward(input_ids=ids, use_cache=True, logits_to_keep=1)

    held = cache_bytes(once().past_key_values)
    for _ in range(WARM_UP):
        once()
    found = yield from _timed(once, effort.repeats, laps, cuda=ids.is_cuda)
    return found | {"cache_bytes": held}


def _decode(model: Any, case: Case, effort: Effort, laps: Laps) -> Turns:
    ids = random_tokens(model, case, effort.seed)
    kind = StockStepper if case.kind == "dense" else OwnStepper
    stepper = kind(model, ids, new=case.new, mode=case.mode)
    try:
        stepper.start()
        steps = min(effort.steps or case.new, case.new)
        stepper.seek((case.new - steps) // 2)
        found = yield from _timed(stepper.step, steps, laps, cuda=ids.is_cuda)
        return found | {"cache_bytes": stepper.cache_bytes()}
    finally:
        stepper.close()


def _timed(work: Work, count: int, laps: Laps, *, cuda: bool) -> Turns:
    """Percentiles of the laps, and the most memory that tensors took; on a CPU other models would be in that."""
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = yield from laps(work, count)
    times = {f"p{percent}": float(np.percentile(seconds, percent)) for percent in (50, 90, 99)}
    peak = int(torch.cuda.max_memory_allocated()) if cuda else None
    return {"times": {**times, "mean": sum(seconds) / count}, "count": count, "peak_memory": peak}


def random_tokens(model: Any, case: Case, seed: int) -> Tensor:
    """A prompt of random tokens, the same for every variant."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = int(model.config.get_text_config().vocab_size)
    ids = torch.randint(0, vocabulary, (case.batch, case.length), generator=generator)
    return ids.to(next(model.parameters()).device)


class OwnStepper:
    """A model with our attention in trisect's Decoder, every graph recorded before a step is timed."""

    def __init__(self, model: Any, prompt: Tensor, *, new: int, mode: str):
        batch, length = prompt.shape
        self.model, self.prompt, self.new = model, prompt, new
        own: Any = "eager" if mode == "plain" else mode
        self.decoder = Decoder(model, batch=batch, max_length=length + max(new, decoder.WARM_UP), mode=own)

    def start(self) -> None:
        """Run the prompt and make every step ready: what is captured or compiled is so afterwards."""
        length = self.prompt.shape[1]
        self.decoder.prefill(self.prompt)
        for _ in range(decoder.WARM_UP):
            self.decoder.step()
        # A graph is recorded for each stretch of the cache, when a step first gets there.
        bucket = self.decoder.bucket
        stretches = range(length // bucket + 1, (length + self.new - 1) // bucket + 1)
        for stretch in stretches if self.decoder.mode != "eager" else ():
            self.decoder.seek(stretch * bucket)
            self.decoder.step()
        self.seek(0)

    def step(self) -> object:
        return self.decoder.step()

    def seek(self, position: int) -> None:
        self.decoder.seek(self.prompt.shape[1] + position)

    def cache_bytes(self) -> int:
        return self.decoder.cache_bytes

    def close(self) -> None:
        for view in layer_views(self.model):
            view.attention.live = None  # the layer's part of the cache
            view.layer._compiled_call_impl = None  # what nn.Module.compile leaves behind
        del self.decoder


class StockStepper:
    """transformers' model and static cache, with a CUDA graph or a compiled step around them."""

    def __init__(self, model: Any, prompt: Tensor, *, new: int, mode: str):
        self.model, self.prompt, self.mode = model, prompt, mode
        # Steps that warm up write to the cache as well, so there is room for them.
        self.cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + max(new, decoder.WARM_UP))
        self.token = prompt[:, -1:].clone()
        self._next: Callable[[Tensor], Tensor] = self._forward
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def start(self) -> None:
        """Run the prompt and make every step ready: what is captured or compiled is so afterwards."""
        self.model(input_ids=self.prompt, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        if self.mode == "compile":
            overhead = "reduce-overhead" if self.prompt.is_cuda else None
            self._next = torch.compile(self._forward, dynamic=False, mode=overhead)
        if self.mode == "graphs":
            with decoder.recordable_experts(layer_views(self.model), batch=len(self.prompt)):
                self._graph = decoder.record_graph(self._advance, rewind=lambda: self.seek(0))
            self.seek(0)
        for _ in range(decoder.WARM_UP):
            self.step()
        self.seek(0)

    @torch.no_grad()
    def step(self) -> None:
        """Decode one token of every sequence, greedily."""
        if self._graph is not None:
            self._graph.replay()
            return
        if self.mode == "compile":
            torch.compiler.cudagraph_mark_step_begin()
        self._advance()

    def seek(self, position: int) -> None:
        """Go on as if `position` tokens had been decoded; their keys and values are whatever is there."""
        length = self.prompt.shape[1] + position
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)
            if hasattr(layer, "cumulative_length_int"):  # sliding windows count on the host as well
                layer.cumulative_length_int = length

    def cache_bytes(self) -> int:
        return cache_bytes(self.cache)

    def close(self) -> None:
        del self.cache, self._graph

    def _advance(self) -> None:
        self.token.copy_(self._next(self.token))

    def _forward(self, token: Tensor) -> Tensor:
        logits = self.model(input_ids=token, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(dim=-1, keepdim=True)
