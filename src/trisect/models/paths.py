"""Which kernels a model's widths will take, in words, and a warning where one will be slow."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trisect.kernels.sdpa import CUDNN_WIDEST, Heads, Kind, channel_step, kind_of, rounded, route
from trisect.models.attention import Attention
from trisect.models.view import layer_views
from trisect.records.shapes import LayerShape

log = logging.getLogger(__name__)

MLP_STEP = 128
"""Widths that matrix products on tensor cores run at full speed for."""


@dataclass(frozen=True)
class Path:
    """What becomes of one layer's shape on one device."""

    words: str
    better: str | None = None
    """Widths that would be faster, where the path is slow."""


def attention_path(shape: LayerShape, kind: Kind, bytes_per_element: int) -> Path:
    """How heads of this shape are attended to."""
    group, size = shape.heads // shape.kv_heads, bytes_per_element
    heads = Heads(qk=shape.qk, vo=shape.vo, group=group, masked=False, single=False, bytes_per_element=size)
    way, widths = route(kind, heads), f"head widths {shape.qk}/{shape.vo}"
    if not way.copies:
        return Path(f"{widths} go to a fused kernel as they are")
    step = channel_step(kind, bytes_per_element)
    equal = rounded(max(shape.qk, shape.vo), step)
    if shape.qk % step or shape.vo % step:
        words = f"{widths} are not both multiples of {step}: every call adds zero channels"
        return Path(words, _pairs(rounded(shape.qk, step), rounded(shape.vo, step), equal, kind))
    if way.pad is None:
        return Path(f"{widths} need a copy of keys and values for every query head in {size * 8} bits")
    words = f"{widths} differ, which this device's kernels do not take: prompts are padded to {way.pad}"
    # On a CPU the padding costs little beside what the kernel saves; single tokens are not padded at all.
    return Path(words, None if kind == "cpu" else f"{equal}/{equal}")


def products_path(shape: LayerShape, kind: Kind, bytes_per_element: int) -> Path:
    """How the layer's matrix products run."""
    step = 1 if kind == "cpu" else 16 // bytes_per_element
    off = {
        "MLP width": shape.mlp,
        "query width": shape.heads * shape.qk,
        "key width": shape.kv_heads * shape.qk,
        "value width": shape.kv_heads * shape.vo,
    }
    slow = [f"{name} {width}" for name, width in off.items() if width % step]
    if not slow:
        return Path("matrix products have aligned rows")
    words = f"{' and '.join(slow)} not a multiple of {step}: matrix products leave the fast kernels"
    low = shape.mlp // MLP_STEP * MLP_STEP
    wanted = [f"MLP {low or MLP_STEP} or {low + MLP_STEP}"] if shape.mlp % step else []
    wanted += [f"head widths in steps of {step}"] if len(slow) > len(wanted) else []
    return Path(words, " and ".join(wanted))


def warn_of_slow_paths(model: Any) -> None:
    """Say once, when a model is loaded, which of its widths are slow here and which would not be."""
    if not any(isinstance(module, Attention) for module in model.modules()):
        return  # a stock model runs stock code
    slow = {path: where for path, where in paths_of(model).items() if path.better is not None}
    if slow:
        lines = [
            f"{_layers(where)}: {path.words}; {path.better} would run at full speed" for path, where in slow.items()
        ]
        device = next(model.parameters()).device
        log.warning("some widths will be slow on %s: %s", device, "; ".join(lines))


def paths_of(model: Any) -> dict[Path, list[int]]:
    """The layers of every distinct path."""
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    kind, size = kind_of(parameter.device), parameter.element_size()
    found: dict[Path, list[int]] = {}
    for view in layer_views(model):
        shape = view.shape()
        for path in (attention_path(shape, kind, size), products_path(shape, kind, size)):
            found.setdefault(path, []).append(view.index)
    return found


def _pairs(qk: int, vo: int, equal: int, kind: Kind) -> str:
    unequal_runs = kind == "cudnn" and max(qk, vo) <= CUDNN_WIDEST
    return f"{qk}/{vo}" if unequal_runs else f"{equal}/{equal}"


def _layers(indices: Sequence[int]) -> str:
    """0, 1, 2, 5 as "layers 0-2, 5"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    spans = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"layer{'s' if len(indices) > 1 else ''} {', '.join(spans)}"
