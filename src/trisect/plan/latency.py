"""Measured times of components at a few widths, straight lines in between."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.shapes import LayerShape

NANOSECONDS = 10**9

Key = tuple[str, int, int, int]
"""Component, d_model, heads, key heads; an MLP knows no heads, so its are 0."""


@dataclass(frozen=True, kw_only=True)
class LatencyTable:
    """Seconds that a component takes at a width, by what decides its matrix shapes."""

    seconds: Mapping[Key, Mapping[int, float]]
    device: str
    dtype: str
    source: str = "the latency table"

    def nanoseconds(self, layer: LayerShape, component: str, width: int) -> int:
        """Rounded up, so that a plan within its budget is within it in seconds too.

        Below the narrowest width measured the time stays what it was there: nothing narrower was seen to
        be faster.
        """
        key = _key(component, layer.d_model, layer.heads, layer.kv_heads)
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

    def to_dict(self) -> dict[str, Any]:
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
        return {"device": self.device, "dtype": self.dtype, "entries": rows}


def read_latency(path: str | Path) -> LatencyTable:
    """A table that `trisect bench --latency-table` wrote."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        points: dict[Key, dict[int, float]] = {}
        for row in data["entries"]:
            heads, kv_heads = int(row.get("heads") or 0), int(row.get("kv_heads") or 0)
            key = _key(str(row["component"]), int(row["d_model"]), heads, kv_heads)
            points.setdefault(key, {})[int(row["width"])] = _seconds(row["seconds"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrisectError(
            f"Cannot read measured times from {path}: {error!r}; "
            "`trisect bench MODEL --latency-table FILE` measures them."
        ) from error
    return LatencyTable(
        seconds=points,
        device=str(data.get("device", "")),
        dtype=str(data.get("dtype", "")),
        source=str(path),
    )


def _key(component: str, d_model: int, heads: int, kv_heads: int) -> Key:
    return (component, d_model, 0, 0) if component == "mlp" else (component, d_model, heads, kv_heads)


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{value!r} is no time")
    return seconds
