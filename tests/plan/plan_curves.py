"""A small model, loss curves for it, and a table of times, for the tests of allocation."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from trisect.plan import Curves, Plan
from trisect.records.parts import COMPONENTS
from trisect.records.shapes import LayerShape, ModelShape

LAYERS = (
    LayerShape(d_model=32, heads=4, kv_heads=2, qk=32, pairs=16, vo=32, mlp=256, gated=True, qk_bias=True),
    LayerShape(d_model=24, heads=2, kv_heads=2, qk=32, pairs=0, vo=48, mlp=192, gated=False, up_bias=True),
)
MODEL = ModelShape(layers=LAYERS, other_parameters=1000, bytes_per_element=2)
ALIGN = 8
STEPS = {"qk": 8, "ov": 8, "mlp": 64}
KEYS = [(layer, part) for layer in range(len(LAYERS)) for part in COMPONENTS]

# A rise for each key and step down, in nats.
RISES = st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=len(KEYS), max_size=len(KEYS))


def grid(key: tuple[int, str]) -> list[int]:
    """The widths that curves reach: down to half, at most three steps."""
    full, step = LAYERS[key[0]].width(key[1]), STEPS[key[1]]
    return [width for width in range(full, full // 2 - 1, -step)][:4]


def curves_from(rises: list[list[float]]) -> Curves:
    """Curves with a point at every width of the grid, each this much above the wider one; slopes never fall."""
    points = {}
    for key, steps in zip(KEYS, rises, strict=True):
        widths = grid(key)
        points[key] = dict(zip(widths, np.cumsum([0.0, *sorted(steps)]).tolist(), strict=False))
    return Curves(points=points, fingerprint="f", token_hash="t", dense_loss=2.0)


def every_choice() -> Iterator[dict[tuple[int, str], int]]:
    """All combinations of widths on the grid."""
    for widths in itertools.product(*(grid(key) for key in KEYS)):
        yield dict(zip(KEYS, widths, strict=True))


def shape_with(widths: dict[tuple[int, str], int]) -> ModelShape:
    """The model at these widths."""
    layers = []
    for index, layer in enumerate(LAYERS):
        qk, vo, mlp = (widths[index, part] for part in COMPONENTS)
        layers.append(replace(layer, qk=qk, pairs=min(layer.pairs, qk // 2), vo=vo, mlp=mlp))
    return ModelShape(layers=tuple(layers), other_parameters=1000, bytes_per_element=2)


def widths_in(plan: Plan) -> dict[tuple[int, str], int]:
    return {(layer, part): plan.layers[layer].of(part) for layer, part in KEYS}


SECONDS = {
    (0, "qk"): {32: 90e-9, 16: 40e-9},
    (0, "ov"): {32: 80e-9, 24: 70e-9, 16: 45e-9},
    (0, "mlp"): {256: 400e-9, 128: 210e-9},
    (1, "qk"): {32: 50e-9, 16: 40e-9},
    (1, "ov"): {48: 75e-9, 24: 30e-9},
    (1, "mlp"): {192: 300e-9, 64: 90e-9},
}


def seconds_at(key: tuple[int, str], width: int) -> float:
    """The oracle for the table below."""
    widths = sorted(SECONDS[key])
    return float(np.interp(width, widths, [SECONDS[key][w] for w in widths]))


def latency_entries() -> dict[str, Any]:
    """The table as `trisect bench` would write it."""
    entries = [
        {
            "component": part,
            "d_model": LAYERS[layer].d_model,
            "heads": LAYERS[layer].heads,
            "kv_heads": LAYERS[layer].kv_heads,
            "width": width,
            "seconds": seconds,
        }
        for (layer, part), points in SECONDS.items()
        for width, seconds in points.items()
    ]
    return {"device": "test", "dtype": "float32", "entries": entries}


def write_latency(folder: Path) -> Path:
    path = folder / "latency.json"
    path.write_text(json.dumps(latency_entries()))
    return path
