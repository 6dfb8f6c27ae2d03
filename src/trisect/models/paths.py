"""A warning where a model's widths will miss the fast kernels of its device, with widths that would not."""

import logging
from typing import Any

from trisect.kernels.sdpa import CUDNN_WIDEST, Heads, Kind, channel_step, kind_of, rounded, route
from trisect.models.attention import Attention
from trisect.models.view import layer_views
from trisect.records.shapes import LayerShape

log = logging.getLogger(__name__)

MLP_STEP = 128
"""Widths that matrix products on tensor cores run at full speed for."""


def slow_attention(shape: LayerShape, kind: Kind, bytes_per_element: int) -> str | None:
    """Why heads of this shape are padded at every call, and which would not be; None where they are not.

    On a CPU the padding costs little beside what the kernel saves; single tokens are not padded at all.
    """
    if not shape.kv_heads:
        return None  # no attention
    group, size = shape.heads // shape.kv_heads, bytes_per_element
    heads = Heads(
        qk=shape.qk + shape.rotated, vo=shape.vo, group=group, masked=False, single=False, bytes_per_element=size
    )
    way, step = route(kind, heads), channel_step(kind, size)
    if kind == "cpu" or way.pad is None:
        return None
    widths, equal = f"head widths {shape.qk}/{shape.vo}", rounded(max(shape.qk, shape.vo), step)
    if shape.qk % step or shape.vo % step:
        qk, vo = rounded(shape.qk, step), rounded(shape.vo, step)
        better = f"{qk}/{vo}" if kind == "cudnn" and max(qk, vo) <= CUDNN_WIDEST else f"{equal}/{equal}"
        why = f"are not both multiples of {step}: every call adds zero channels"
        return f"{widths} {why}; {better} would run at full speed"
    why = f"differ, which this device's kernels do not take: prompts are padded to {way.pad}"
    return f"{widths} {why}; {equal}/{equal} would run at full speed"


def slow_products(shape: LayerShape, kind: Kind, bytes_per_element: int) -> str | None:
    """Which matrix products have rows off the grid, and what would not; None where all are aligned."""
    step = channel_step(kind, bytes_per_element)
    widths = {
        "MLP width": shape.mlp,
        "query width": shape.heads * shape.qk,
        "key width": shape.kv_heads * shape.qk,
        "value width": shape.kv_heads * shape.vo,
    }
    slow = [f"{name} {width}" for name, width in widths.items() if width % step]
    if not slow:
        return None
    low = shape.mlp // MLP_STEP * MLP_STEP
    wanted = [f"MLP {low or MLP_STEP} or {low + MLP_STEP}"] if shape.mlp % step else []
    wanted += [f"head widths in steps of {step}"] if len(slow) > len(wanted) else []
    why = f"not a multiple of {step}: matrix products leave the fast kernels"
    return f"{' and '.join(slow)} {why}; {' and '.join(wanted)} would run at full speed"


def warn_of_slow_paths(model: Any) -> None:
    """Say once, when a model is loaded, which of its widths are slow here and which would not be."""
    if not any(isinstance(module, Attention) for module in model.modules()):
        return  # a stock model runs stock code
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    kind, size = kind_of(parameter.device), parameter.element_size()
    slow: dict[str, list[str]] = {}
    for view in layer_views(model):
        for reason in (slow_attention(view.shape(), kind, size), slow_products(view.shape(), kind, size)):
            if reason is not None:
                slow.setdefault(reason, []).append(str(view.index))
    if slow:
        lines = [f"layers {', '.join(layers)}: {reason}" for reason, layers in slow.items()]
        log.warning("some widths will be slow on %s: %s", parameter.device, "; ".join(lines))
