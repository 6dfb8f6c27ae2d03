"""Measured times of components over the aligned grid: what `--budget latency` plans with.

A layer's time is the sum of its components' and of what no width changes. Attention itself belongs to two
components, so each has half of its time at its own width: exact where both widths are equal.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from trisect.bench.measure import WARM_UP, Lapping, Work, device_name, is_cuda, laps_on
from trisect.bench.sweep import Sweep
from trisect.config import DEFAULT_ALIGN
from trisect.errors import TrisectError
from trisect.kernels import rotate_qk, sdpa
from trisect.models.checkpoint import DTYPES, read_shape
from trisect.plan import budget, problem
from trisect.records.shapes import LayerShape, ModelShape
from trisect.support.files import check_writable, write_json

COPIES = 8  # sets of operands at most: taken in turn, so that weights come from memory, not from a cache
CACHE_BYTES = 256 << 20  # operands of one turn together, several times the last cache of today's devices


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a layer is timed on."""

    phase: str = "prefill"
    batch: int = 1
    length: int = 2048  # tokens of a prefill; tokens in the cache for decoding

    @property
    def tokens(self) -> int:
        """New ones per sequence."""
        return self.length if self.phase == "prefill" else 1


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Random operands of one layer's components."""

    layer: LayerShape
    workload: Workload
    device: str
    dtype: torch.dtype
    generator: torch.Generator

    def seconds(self, component: str, lap: Lapping, repeats: int) -> float:
        """The time of a component at the layer's width: its matrices, and half of attention if it has some."""
        makes = {"qk": self._query_key, "ov": self._value_output, "mlp": self._mlp, budget.REST: self._rest}
        shares = {makes[component]: 1.0, **({self._attention: 0.5} if component in ("qk", "ov") else {})}
        total = 0.0
        for make, share in shares.items():
            works = [make() for _ in range(self._copies())]
            turn = map(lambda work: work(), cycle(works)).__next__
            lap(turn, WARM_UP + len(works))
            total += share * median(lap(turn, repeats))
        return total

    def _random(self, *shape: int) -> Tensor:
        empty = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return empty.normal_(std=0.02, generator=self.generator)

    def _weights(self, *names: str) -> list[Tensor]:
        return [self._random(*reversed(budget.linear_sizes(self.layer, name))) for name in names]

    def _rows(self, width: int) -> Tensor:
        """Activations of all new tokens."""
        return self._random(self.workload.batch * self.workload.tokens, width)

    def _query_key(self) -> Work:
        layer, x, (W_q, W_k) = self.layer, self._rows(self.layer.d_model), self._weights("q", "k")
        grid = (self.workload.batch, self.workload.tokens)
        table = (self._random(1, grid[1], 2 * layer.pairs), self._random(1, grid[1], 2 * layer.pairs))
        # Every head has its own order of the frequencies, as narrow heads have their own set.
        order = torch.rand(layer.kv_heads, layer.pairs, generator=self.generator, device=self.device)
        index = order.argsort(dim=-1).to(torch.int16)

        def work() -> object:
            q = linear(x, W_q).view(*grid, layer.heads, layer.qk)
            k = linear(x, W_k).view(*grid, layer.kv_heads, layer.qk)
            if not layer.pairs:
                return q, k
            return rotate_qk(q, k, pairs=layer.pairs, layout="half", table=table, index=index, in_place=True)

        return work

    def _value_output(self) -> Work:
        x, (W_v, W_o) = self._rows(self.layer.d_model), self._weights("v", "o")
        heads = self._rows(W_o.shape[1])
        return lambda: (linear(x, W_v), linear(heads, W_o))

    def _attention(self) -> Work:
        layer, load = self.layer, self.workload
        q = self._random(load.batch, layer.heads, load.tokens, layer.qk)
        k, v = (self._random(load.batch, layer.kv_heads, load.length, x) for x in (layer.qk, layer.vo))
        return lambda: sdpa.sdpa(q, k, v, None, scale=layer.qk**-0.5)

    def _mlp(self) -> Work:
        x, (W_up, W_down) = self._rows(self.layer.d_model), self._weights("up", "down")
        if not self.layer.gated:
            return lambda: linear(silu(linear(x, W_up)), W_down)
        (W_gate,) = self._weights("gate")
        return lambda: linear(silu(linear(x, W_gate)) * linear(x, W_up), W_down)

    def _rest(self) -> Work:
        D = self.layer.d_model
        x, weight = self._rows(D), self._random(D)

        def work() -> object:
            y = x + rms_norm(x, (D,), weight)
            return y + rms_norm(y, (D,), weight)

        return work

    def _copies(self) -> int:
        """Sets of operands to take in turn. On a CPU one: its caches are part of what small models run on."""
        if not is_cuda(self.device):
            return 1
        layer = self.layer
        widest = max(layer.heads * max(layer.qk, layer.vo), layer.mlp)
        return max(1, min(COPIES, CACHE_BYTES // max(1, widest * layer.d_model * self.dtype.itemsize)))


def measure_latency(
    shape: ModelShape,
    workload: Workload,
    *,
    device: str,
    dtype: torch.dtype,
    lap: Lapping,
    align: int | None = DEFAULT_ALIGN,
    repeats: int = 20,
    known: budget.LatencyTable | None = None,
    save: Callable[[budget.LatencyTable], None] = lambda table: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> budget.LatencyTable:
    """Times of every component at every width of the grid; `known` ones are not taken again."""
    if any(layer.experts for layer in shape.layers):
        raise TrisectError("How long experts take depends on the batch: plan with --budget params or flops.")
    setting: dict[str, Any] = {"device": device_name(device), "workload": asdict(workload)}
    setting["dtype"] = str(dtype).removeprefix("torch.")
    table = known or budget.LatencyTable(seconds={}, **setting)
    for name, value in setting.items():
        if getattr(table, name) != value:
            other = f"{table.source} was measured with {name} {getattr(table, name)!r}, not {value!r}"
            raise TrisectError(f"{other}; name another file with --latency-table, or remove this one.")
    points = [p for p in grid_points(shape, align=align) if p[2] not in table.seconds.get(_key(*p[:2]), {})]
    generator = torch.Generator(device).manual_seed(0)
    for number, (layer, component, width) in enumerate(points):
        narrow = layer
        if component != budget.REST:  # attention takes one width for queries, keys and values
            heads: Any = {"qk": width, "vo": width, "pairs": min(layer.pairs, width // 2)}
            narrow = replace(layer, **({"mlp": width} if component == "mlp" else heads))
        operands = Operands(layer=narrow, workload=workload, device=device, dtype=dtype, generator=generator)
        table = table.with_time(_key(layer, component), width, operands.seconds(component, lap, repeats))
        save(table)
        progress(number + 1, len(points))
    return table


def write_table(name: str, sweep: Sweep, path: Path, *, trust_remote_code: bool = False, **how: Any) -> str:
    """Time the components of a model into a file, completing one that is there; says what is in it."""
    check_writable(path)
    if len(sweep.batches) > 1 or len(sweep.lengths) > 1:
        raise TrisectError("A latency table is of one batch and one length; give one of each.")
    # The default is both phases; a table has one workload, so the first.
    load = Workload(phase=sweep.phases[0], batch=sweep.batches[0], length=sweep.lengths[0])
    shape = read_shape(name, trust_remote_code=trust_remote_code)[0]
    how |= {"device": sweep.device, "dtype": DTYPES[sweep.dtype], "lap": laps_on(sweep.device)}
    how |= {"known": budget.read_latency(path) if path.exists() else None}
    table = measure_latency(shape, load, save=lambda made: write_json(path, made.to_dict()), **how)
    count, dense = sum(map(len, table.seconds.values())), 1000 * layer_seconds(table, shape.layers[0])
    work = f"{load.phase} {load.batch} x {load.length}"
    return f"{count} times of {name} on {table.device}, {work}; a dense layer comes to {dense:.3f} ms."


def grid_points(shape: ModelShape, *, align: int | None) -> Iterator[tuple[LayerShape, str, int]]:
    """Layer, component and width to be timed, full widths included; equal layers once."""
    kinds: dict[Any, LayerShape] = {}
    for layer in shape.layers:
        for component in (*layer.components, budget.REST):
            kinds.setdefault(_key(layer, component), layer)
    for (component, *_), layer in kinds.items():
        if component == budget.REST:
            yield layer, budget.REST, 0
            continue
        step = problem.grid_of(layer, component, align=align or DEFAULT_ALIGN).step
        full = layer.width(component)
        yield from ((layer, component, width) for width in (*range(step, full, step), full))


def layer_seconds(table: budget.LatencyTable, layer: LayerShape) -> float:
    """What the table predicts for a whole layer."""
    parts = sum(table.nanoseconds(layer, part, layer.width(part)) for part in layer.components)
    return (parts + table.rest(layer)) / 1e9


def _key(layer: LayerShape, component: str) -> tuple[str, int, int, int]:
    return budget.key_of(component, layer.d_model, layer.heads, layer.kv_heads)
