"""What a shape costs: parameters, cache bytes and FLOPs, counted from integers alone.

Convention with `ModelShape.other_parameters`: it holds embeddings, norms and the head. Biases of
the decoder's linear layers are not in it: they shrink too, and are counted from the shape's flags.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from trisect.errors import TrisectError
from trisect.records.shapes import COMPONENTS, LINEARS, WIDTH_FIELDS, LayerShape, ModelShape
from trisect.support.checks import read_table, table_rows

PREFILL_LENGTH = 2048


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The cost of one model."""

    components: Mapping[str, int]  # component -> parameters of its matrices, over all layers
    linear_parameters: int  # all matrices of the decoder layers: what `ratio` is a fraction of
    parameters: int  # everything: matrices, biases, norms, embeddings
    kv_bytes_per_token: int
    flops: int  # one prefill of PREFILL_LENGTH tokens through all decoder layers, batch 1


@dataclass(frozen=True, kw_only=True)
class Change:
    """The share of each cost that is gone."""

    components: Mapping[str, float]
    ratio: float  # of the decoder's linear weights: the paper's compression ratio
    parameters: float  # of the whole model, embeddings included
    kv_bytes_per_token: float
    flops: float


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs by kind, a multiply-add counted as two."""

    projections: int = 0
    scores: int = 0  # queries times keys and weights times values, all of them: the paper does not halve for causality
    softmax: int = 0
    mlp: int = 0
    norms: int = 0
    residuals: int = 0
    head: int = 0  # logits; the paper counts decoder layers only

    @property
    def layers(self) -> int:
        """What the paper counts."""
        return self.total - self.head

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(vars(self).values())

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def budget_of(shape: ModelShape) -> Budget:
    """Count a model."""
    components = {part: sum(matrix_parameters(layer, part) for layer in shape.layers) for part in COMPONENTS}
    linear = sum(components.values())
    biases = sum(bias_parameters(layer) for layer in shape.layers)
    cached, length = sum(cached_channels(layer) for layer in shape.layers), PREFILL_LENGTH
    return Budget(
        components=components,
        linear_parameters=linear,
        parameters=linear + biases + shape.other_parameters,
        kv_bytes_per_token=cached * shape.bytes_per_element,
        flops=sum(layer_flops(layer, batch=1, tokens=length, context=length).total for layer in shape.layers),
    )


def compare(before: Budget, after: Budget) -> Change:
    """What went, as fractions of what was there."""

    def removed(old: int, new: int) -> float:
        return 1 - new / old if old else 0.0

    return Change(
        components={name: removed(count, after.components[name]) for name, count in before.components.items()},
        ratio=removed(before.linear_parameters, after.linear_parameters),
        parameters=removed(before.parameters, after.parameters),
        kv_bytes_per_token=removed(before.kv_bytes_per_token, after.kv_bytes_per_token),
        flops=removed(before.flops, after.flops),
    )


def matrix_parameters(layer: LayerShape, component: str) -> int:
    """Matrix elements of one component of one layer."""
    return sum(linear_parameters(layer, name) for name in linears_of(layer, component))


def linears_of(layer: LayerShape, component: str) -> tuple[str, ...]:
    """The linear maps that a component of this layer is made of."""
    if component not in layer.components:
        return ()
    return tuple(name for name in LINEARS[component] if name != "gate" or layer.gated)


def linear_parameters(layer: LayerShape, name: str) -> int:
    """Matrix elements of one linear map, or of the two that it became."""
    d_in, d_out = linear_sizes(layer, name)
    for linear in layer.linears:
        if linear.name == name:
            # Each group has its own narrow map of the whole input; the wide map is block-diagonal.
            return linear.rank * (linear.groups * d_in + d_out)
    return d_in * d_out * (layer.mlps if name in LINEARS["mlp"] else 1)


def linear_sizes(layer: LayerShape, name: str) -> tuple[int, int]:
    """Inputs and outputs of one linear map."""
    D = layer.d_model
    return {
        "q": (layer.q_in or D, layer.heads * (layer.qk + layer.rotated + layer.vo * layer.output_gate)),
        "k": (layer.kv_in or D, layer.kv_heads * layer.qk),
        "v": (layer.kv_in or D, layer.kv_heads * layer.vo),
        "o": (linear_heads(layer, "o") * layer.vo, D),
        "gate": (D, layer.mlp),
        "up": (D, layer.mlp),
        "down": (layer.mlp, D),
    }[name]


def linear_heads(layer: LayerShape, name: str) -> int:
    """Heads side by side in the outputs of one linear map (in the inputs of o); 1 in an MLP."""
    output_heads = 1 if layer.shared_output else layer.heads
    return {"q": layer.heads, "k": layer.kv_heads, "v": layer.kv_heads, "o": output_heads}.get(name, 1)


def cached_channels(layer: LayerShape) -> int:
    """Numbers the KV cache holds per token; a key is cached narrow only where nothing rotates or norms it."""
    if layer.kv_in:
        return layer.kv_in + layer.rotated
    channels = {"k": layer.kv_heads * layer.qk, "v": layer.kv_heads * layer.vo}
    plain_keys = layer.pairs == 0 and not layer.qk_norm
    for linear in layer.linears:
        if linear.cached and (linear.name == "v" or (linear.name == "k" and plain_keys)):
            channels[linear.name] = linear.groups * linear.rank
    return sum(channels.values())


def bias_parameters(layer: LayerShape) -> int:
    """Bias elements of one layer's linear maps."""
    mlps = layer.experts or 1
    biases = {
        "qk": (layer.heads + layer.kv_heads) * layer.qk * layer.qk_bias,
        "ov": layer.kv_heads * layer.vo * layer.v_bias
        + layer.heads * layer.vo * (layer.qk_bias and layer.output_gate)
        + layer.d_model * layer.o_bias,
        "mlp": mlps * ((2 if layer.gated else 1) * layer.mlp * layer.up_bias + layer.d_model * layer.down_bias),
    }
    return sum(biases[component] for component in layer.components)


def layer_flops(layer: LayerShape, *, batch: int, tokens: int, context: int) -> Flops:
    """One layer: `tokens` new ones in each sequence, each looking at `context` keys."""
    # With tokens = context = L this is the paper's formula (appendix, runtime analysis), with unequal widths and
    # shared key heads: 8BLHD + 4BL^2 AD + BL^2 A + 6BLIH + 4BLH, where the first D is the width of all heads together
    # and the second that of one head.
    rows = batch * tokens
    return Flops(
        projections=2 * rows * (matrix_parameters(layer, "qk") + matrix_parameters(layer, "ov") + layer.whole),
        scores=2 * rows * context * layer.heads * (layer.qk + layer.rotated + layer.vo),
        softmax=rows * context * layer.heads,
        mlp=2 * rows * matrix_parameters(layer, "mlp") // layer.mlps * layer.active_mlps,
        norms=2 * rows * layer.d_model,
        residuals=2 * rows * layer.d_model,
    )


# What one component of one layer costs at a width. Every count of `budget_of` is a constant plus, per component, a
# price per channel times its width; the price is read off `budget_of` itself: the two cannot disagree.  [math.md A-2]

NANOSECONDS = 10**9
ShapeKey = tuple[str, int, int, int]  # component, d_model, heads, key heads; an MLP knows no heads, so its are 0
REST = "rest"  # what a layer does beside its components, at any width: norms and residuals
HEADLESS = ("mlp", REST)


class Time(BaseModel, strict=True):
    """A row of a file of measured times."""

    component: str
    d_model: int
    heads: int | None = None
    kv_heads: int | None = None
    width: int
    seconds: float = Field(gt=0, lt=math.inf)


@dataclass(frozen=True, kw_only=True)
class LatencyTable:
    """Seconds that a component takes at a width, by what decides its matrix shapes."""

    seconds: Mapping[ShapeKey, Mapping[int, float]]
    device: str
    dtype: str
    workload: Mapping[str, Any] = field(default_factory=dict)  # what was run: phase, batch, length
    source: str = "the latency table"

    def nanoseconds(self, layer: LayerShape, component: str, width: int) -> int:
        """Rounded up, so that a plan within its budget is within it in seconds too."""
        # Below the narrowest width measured the time stays: nothing narrower was seen to be faster.
        key = key_of(component, layer.d_model, layer.heads, layer.kv_heads)
        points = self.seconds.get(key)
        if points is None or width > max(points):
            shape = f"d_model {layer.d_model}, {layer.heads} heads, {layer.kv_heads} key heads, width {width}"
            measure = "`trisect bench MODEL --latency-table FILE` measures this model"
            raise TrisectError(f"{self.source} has no time for {component} of {shape}; {measure}.")
        below = max((w for w in points if w <= width), default=min(points))
        above = min((w for w in points if w >= width), default=below)
        share = (width - below) / (above - below) if above > below else 0.0
        return math.ceil(round(NANOSECONDS * (points[below] + share * (points[above] - points[below])), 3))

    def rest(self, layer: LayerShape) -> int:
        """Nanoseconds that no width changes; 0 where nobody measured them."""
        measured = key_of(REST, layer.d_model, 0, 0) in self.seconds
        return self.nanoseconds(layer, REST, 0) if measured else 0

    def with_time(self, key: ShapeKey, width: int, seconds: float) -> "LatencyTable":
        """One more point."""
        points = {**self.seconds.get(key, {}), width: seconds}
        return replace(self, seconds={**self.seconds, key: points})

    def to_dict(self) -> dict[str, Any]:
        """One row per point, ready for JSON; `read_latency` reads it."""
        header = {"device": self.device, "dtype": self.dtype, "workload": dict(self.workload)}
        return {**header, "entries": table_rows(Time, self.seconds)}


def read_latency(path: str | Path) -> LatencyTable:
    """A table that `trisect bench --latency-table` wrote."""
    try:
        data, points = read_table(path, Time, "entries", what="measured times")
        texts = {"device": str(data.get("device", "")), "dtype": str(data.get("dtype", ""))}
        workload = dict(data.get("workload") or {})
    except (ValueError, TypeError) as error:
        raise TrisectError(f"{error} `trisect bench MODEL --latency-table FILE` measures one.") from error
    seconds = {key_of(key[0], key[1], key[2] or 0, key[3] or 0): curve for key, curve in points.items()}
    return LatencyTable(seconds=seconds, workload=workload, source=str(path), **texts)


def key_of(component: str, d_model: int, heads: int, kv_heads: int) -> ShapeKey:
    """What decides a component's matrix shapes beside its width."""
    return (component, d_model, 0, 0) if component in HEADLESS else (component, d_model, heads, kv_heads)


FIELDS = {
    "linear": "linear_parameters",  # matrices of the decoder: what a ratio counts
    "params": "parameters",  # biases too: what a whole model's size counts
    "kv": "kv_bytes_per_token",
    "flops": "flops",
}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Prices in one unit: a key of FIELDS, or nanoseconds where a table is given."""

    shape: ModelShape
    unit: str
    table: LatencyTable | None = None

    def of(self, layer: int, component: str, width: int) -> int:
        """The cost of a component at this width."""
        if self.table is not None:
            return self.table.nanoseconds(self.shape.layers[layer], component, width)
        itemsize = self.shape.bytes_per_element
        return width * _price(self.shape.layers[layer], component, self.unit, itemsize)

    def full(self, layer: int, component: str) -> int:
        """Its cost as it is; nothing where the layer has no such component."""
        width = self.shape.layers[layer].width(component)
        return self.of(layer, component, width) if width else 0

    def fixed(self, layer: int) -> int:
        """What a layer costs whatever its widths: norms, softmax, biases of outputs."""
        if self.table is not None:
            return self.table.rest(self.shape.layers[layer])
        bare = replace(self.shape.layers[layer], qk=0, pairs=0, vo=0, mlp=0)
        return _total(bare, self.unit, self.shape.bytes_per_element)

    def whole(self) -> int:
        """The whole model, with what it has beside its layers."""
        layers = range(len(self.shape.layers))
        parts = sum(self.full(layer, part) for layer in layers for part in COMPONENTS)
        outside = self.shape.other_parameters if self.unit == "params" else 0
        return parts + sum(self.fixed(layer) for layer in layers) + outside


@lru_cache(maxsize=4096)
def _price(layer: LayerShape, component: str, unit: str, itemsize: int) -> int:
    """Per channel of width."""
    width = layer.width(component)
    without = replace(layer, **{WIDTH_FIELDS[component]: 0})  # type: ignore[arg-type]
    return (_total(layer, unit, itemsize) - _total(without, unit, itemsize)) // max(1, width)


def _total(layer: LayerShape, unit: str, itemsize: int) -> int:
    alone = ModelShape(layers=(layer,), other_parameters=0, bytes_per_element=itemsize)
    return int(getattr(budget_of(alone), FIELDS[unit]))
