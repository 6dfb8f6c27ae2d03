"""The balanced plan: the widths whose measured losses add up to least, under an exact parameter budget.

A multiple-choice knapsack, one item per layer and component, one choice per width on the grid, solved exactly
by dynamic programming over the budget in units of the grid's smallest step.                  [math.md A-1]
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trisect.errors import TrisectError
from trisect.parts import COMPONENTS
from trisect.plan.align import grid_of, pairs_at
from trisect.plan.budget import matrix_parameters
from trisect.plan.curves import Curves
from trisect.plan.plan import Plan
from trisect.shapes import LayerShape, LayerWidths, ModelShape, widths_of

# Widths between grid points would only run slower; exact ranks have no grid, so they get the finest one.
FINEST_ALIGN = 8


@dataclass(frozen=True, kw_only=True)
class Choice:
    width: int
    cost: int
    loss: float


def balanced_plan(
    shape: ModelShape,
    curves: Curves,
    *,
    ratio: float,
    parts: Sequence[str],
    layers: Sequence[int] | None,
    align: int | None,
    method: str,
) -> Plan:
    """Widths that lose least and never cost more than (1 - ratio) of the chosen components' parameters."""
    chosen = range(len(shape.layers)) if layers is None else sorted(layers)
    keys = [(layer, part) for layer in chosen for part in COMPONENTS if part in parts]
    items = [_choices(shape.layers[layer], curves, layer, part, align) for layer, part in keys]
    full = sum(matrix_parameters(shape.layers[layer], part) for layer, part in keys)
    picked = knapsack(items, budget=math.floor((1 - ratio) * full))
    if picked is None:
        least = sum(min(choice.cost for choice in item) for item in items)
        raise TrisectError(
            f"A ratio of {ratio:g} is beyond the measured curves, which reach {1 - least / full:.2f}; "
            "use less, or --allocate uniform."
        )
    widths = {layer: widths_of(layer_shape) for layer, layer_shape in enumerate(shape.layers)}
    for (layer, part), choice in zip(keys, picked, strict=True):
        widths[layer] = _with(widths[layer], shape.layers[layer], part, choice.width)
    return Plan(layers=tuple(widths.values()), method=method, ratio=ratio, align=align)


def knapsack(items: Sequence[Sequence[Choice]], *, budget: int) -> list[Choice] | None:
    """One choice per item with the least total loss and total cost within the budget; None if none fits."""
    unit = math.gcd(*(choice.cost for item in items for choice in item))
    size = budget // unit
    best = np.full(size + 1, np.inf)  # least loss for exactly this many units
    best[0] = 0.0
    trail = []
    for item in items:
        step, used = np.full(size + 1, np.inf), np.full(size + 1, -1)
        for number, choice in enumerate(item):
            cost = choice.cost // unit
            if cost > size:
                continue
            loss = best[: size + 1 - cost] + choice.loss
            better = np.flatnonzero(loss < step[cost:]) + cost
            step[better], used[better] = loss[better - cost], number
        best = step
        trail.append(used)
    spent = int(best.argmin())
    if not np.isfinite(best[spent]):
        return None
    picked: list[Choice] = []
    for item, used in zip(reversed(items), reversed(trail), strict=True):
        choice = item[used[spent]]
        picked.append(choice)
        spent -= choice.cost // unit
    return picked[::-1]


def _choices(
    layer: LayerShape, curves: Curves, index: int, component: str, align: int | None
) -> list[Choice]:
    """Every width of the grid that the curve reaches, and the width as it is."""
    full, step = layer.width(component), grid_of(layer, component, align=align or FINEST_ALIGN).step
    per_channel = matrix_parameters(layer, component) // full
    first = -(-curves.floor(index, component) // step) * step
    return [
        Choice(width=width, cost=per_channel * width, loss=curves.loss_at(index, component, width))
        for width in [*range(first, full, step), full]
    ]


def _with(widths: LayerWidths, layer: LayerShape, component: str, width: int) -> LayerWidths:
    qk = width if component == "qk" else widths.qk
    return LayerWidths(
        qk=qk,
        pairs=pairs_at(layer, qk=qk),
        vo=width if component == "ov" else widths.vo,
        mlp=width if component == "mlp" else widths.mlp,
    )
