"""What one component of one layer costs at a width: an integer in whatever the budget counts.

Every count of `budget_of` is a constant plus, per component, a price per channel times its width. So costs
of components add up, and the price is read off `budget_of` itself: the two cannot disagree.    [math.md A-2]
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.plan.budget import budget_of
from trisect.records.parts import COMPONENTS
from trisect.records.shapes import WIDTH_FIELDS, LayerShape, ModelShape
from trisect.support.checks import read_json

NANOSECONDS = 10**9

Key = tuple[str, int, int, int]
"""Component, d_model, heads, key heads; an MLP knows no heads, so its are 0."""

REST = "rest"
"""What a layer does beside its components, at any width: norms and residuals."""
HEADLESS = ("mlp", REST)


@dataclass(frozen=True, kw_only=True)
class LatencyTable:
    """Seconds that a component takes at a width, by what decides its matrix shapes."""

    seconds: Mapping[Key, Mapping[int, float]]
    device: str
    dtype: str
    workload: Mapping[str, Any] = field(default_factory=dict)
    """What was run: phase, batch, length."""
    source: str = "the latency table"

    def nanoseconds(self, layer: LayerShape, component: str, width: int) -> int:
        """Rounded up, so that a plan within its budget is within it in seconds too.

        Below the narrowest width measured the time stays what it was there: nothing narrower was seen to
        be faster.
        """
        key = key_of(component, layer.d_model, layer.heads, layer.kv_heads)
        points = self.seconds.get(key)
        if points is None or width > max(points):
            shape = f"d_model {layer.d_model}, {layer.heads} heads, {layer.kv_heads} key heads, width {width}"
            raise TrisectError(
                f"{self.source} has no time for {component} of {shape}; measure this model with "
                "`trisect bench MODEL --latency-table FILE`."
            )
        below = max((w for w in points if w <= width), default=min(points))
        above = min((w for w in points if w >= width), default=below)
        share = (width - below) / (above - below) if above > below else 0.0
        return math.ceil(round(NANOSECONDS * (points[below] + share * (points[above] - points[below])), 3))

    def rest(self, layer: LayerShape) -> int:
        """Nanoseconds that no width changes; 0 where nobody measured them."""
        measured = key_of(REST, layer.d_model, 0, 0) in self.seconds
        return self.nanoseconds(layer, REST, 0) if measured else 0

    def with_time(self, key: Key, width: int, seconds: float) -> "LatencyTable":
        """One more point."""
        points = {**self.seconds.get(key, {}), width: seconds}
        return replace(self, seconds={**self.seconds, key: points})

    def to_dict(self) -> dict[str, Any]:
        """One row per point, ready for JSON; `read_latency` reads it."""
        rows = [
            {
                "component": component,
                "d_model": d_model,
                "heads": heads,
                "kv_heads": kv_heads,
                "width": width,
                "seconds": seconds,
            }
            for (component, d_model, heads, kv_heads), points in self.seconds.items()
            for width, seconds in points.items()
        ]
        header = {"device": self.device, "dtype": self.dtype, "workload": dict(self.workload)}
        return {**header, "entries": rows}


def read_latency(path: str | Path) -> LatencyTable:
    """A table that `trisect bench --latency-table` wrote."""
    try:
        data = read_json(path)
        points: dict[Key, dict[int, float]] = {}
        for row in data["entries"]:
            heads, kv_heads = int(row.get("heads") or 0), int(row.get("kv_heads") or 0)
            key = key_of(str(row["component"]), int(row["d_model"]), heads, kv_heads)
            points.setdefault(key, {})[int(row["width"])] = _seconds(row["seconds"])
        workload = dict(data.get("workload") or {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrisectError(
            f"Cannot read measured times from {path}: {error!r}; "
            "`trisect bench MODEL --latency-table FILE` measures them."
        ) from error
    return LatencyTable(
        seconds=points,
        device=str(data.get("device", "")),
        dtype=str(data.get("dtype", "")),
        workload=workload,
        source=str(path),
    )


def key_of(component: str, d_model: int, heads: int, kv_heads: int) -> Key:
    """What decides a component's matrix shapes beside its width."""
    headless = component in HEADLESS
    return (component, d_model, 0, 0) if headless else (component, d_model, heads, kv_heads)


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{value!r} is no time")
    return seconds


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
        bare = self.shape.layers[layer].with_widths(qk=0, pairs=0, vo=0, mlp=0)
        return _total(bare, self.unit, self.shape.bytes_per_element)

    def outside(self) -> int:
        """What the whole model costs beside its layers."""
        return self.shape.other_parameters if self.unit == "params" else 0

    def whole(self) -> int:
        """The whole model."""
        layers = range(len(self.shape.layers))
        parts = sum(self.full(layer, part) for layer in layers for part in COMPONENTS)
        return parts + sum(self.fixed(layer) for layer in layers) + self.outside()


@lru_cache(maxsize=4096)
def _price(layer: LayerShape, component: str, unit: str, itemsize: int) -> int:
    """Per channel of width."""
    width = layer.width(component)
    without = replace(layer, **{WIDTH_FIELDS[component]: 0})  # type: ignore[arg-type]
    return (_total(layer, unit, itemsize) - _total(without, unit, itemsize)) // max(1, width)


def _total(layer: LayerShape, unit: str, itemsize: int) -> int:
    alone = ModelShape(layers=(layer,), other_parameters=0, bytes_per_element=itemsize)
    return int(getattr(budget_of(alone), FIELDS[unit]))
