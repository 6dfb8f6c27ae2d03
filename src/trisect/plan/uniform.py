"""The uniform plan: the same share off every chosen component of every chosen layer."""

from collections.abc import Sequence

from trisect.errors import TrisectError
from trisect.parts import COMPONENTS
from trisect.plan.align import Grid, grid_of, pairs_at
from trisect.plan.plan import Plan
from trisect.plan.problem import Key, Planner, Problem, chosen_layers
from trisect.shapes import LayerShape, LayerWidths, ModelShape, widths_of

BISECTIONS = 40
"""Enough that no width of any model lies between the last two ratios."""


def uniform_plan(
    shape: ModelShape,
    *,
    ratio: float,
    parts: Sequence[str],
    layers: Sequence[int] | None,
    align: int | None,
    method: str = "a3",
) -> Plan:
    """r = (1 - ratio) d in each of `parts`, on the grid; `layers` None means every layer."""
    chosen = frozenset(chosen_layers(layers, num_layers=len(shape.layers)))
    _check_minimum(shape, ratio=ratio, parts=parts, chosen=chosen, align=align)
    widths = tuple(
        _narrowed(layer, ratio=ratio, parts=parts, align=align) if index in chosen else widths_of(layer)
        for index, layer in enumerate(shape.layers)
    )
    if widths == tuple(widths_of(layer) for layer in shape.layers):
        raise TrisectError(
            f"A ratio of {ratio:g} removes nothing: every width of {','.join(parts)} rounds back "
            f"to what it is{_on_grid(align)}; use a larger --ratio{_or_no_grid(align)}."
        )
    return Plan(layers=widths, method=method, ratio=ratio, align=align)


def uniform_planner(problem: Problem) -> Planner:
    """The widest uniform widths within a budget: never over it, floors and grid held.           [math.md A-4]

    Other than `uniform_plan`, which goes to the nearest point of the grid and may end a little above.
    """
    ends = {key: (problem.grid(key), problem.lowest(key)) for key in problem.keys}

    def widths_at(ratio: float) -> dict[Key, int]:
        return {key: max(low, grid.width_at(ratio)) for key, (grid, low) in ends.items()}

    def at(budget: int) -> Plan:
        low, high = 0.0, 1.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if problem.cost(widths_at(middle)) <= budget:
                high = middle
            else:
                low = middle
        return problem.plan(widths_at(high))

    return Planner(least=problem.cost(widths_at(1.0)), at=at, curved=False)


def below_floor(problem: Problem, ratio: float) -> bool:
    """Whether plain uniform widths at this ratio would go below what a floor asks for."""
    return any(
        problem.floors.of(key[1]) > 0 and problem.grid(key).width_at(ratio) < problem.lowest(key)
        for key in problem.keys
    )


def _narrowed(layer: LayerShape, *, ratio: float, parts: Sequence[str], align: int | None) -> LayerWidths:
    new = {
        component: grid_of(layer, component, align=align).width_at(ratio)
        if component in parts
        else layer.width(component)
        for component in COMPONENTS
    }
    return LayerWidths(qk=new["qk"], pairs=pairs_at(layer, qk=new["qk"]), vo=new["ov"], mlp=new["mlp"])


def _check_minimum(
    shape: ModelShape,
    *,
    ratio: float,
    parts: Sequence[str],
    chosen: frozenset[int],
    align: int | None,
) -> None:
    grids = {
        (index, part): grid_of(shape.layers[index], part, align=align)
        for index in sorted(chosen)
        for part in parts
    }
    for (index, part), grid in grids.items():
        if not grid.holds(ratio):
            raise TrisectError(
                f"A ratio of {ratio:g} leaves {part} of layer {index} at {grid.width_at(ratio)} of "
                f"{grid.width}, below its minimum of {grid.minimum}{_on_grid(align)}; "
                f"{_way_out(set(grids.values()), align=align)}."
            )


def _way_out(grids: set[Grid], *, align: int | None) -> str:
    """What to type instead: the largest ratio that holds, unless it would remove nothing."""
    # Hundredths are what people type; a ratio of 0.01 holds for every grid.
    hundredths = [k / 100 for k in range(1, 100)]
    largest = max(ratio for ratio in hundredths if all(grid.holds(ratio) for grid in grids))
    if all(grid.width_at(largest) == grid.width for grid in grids):
        return f"the model is too narrow to be cut at all{_on_grid(align)}{_or_no_grid(align)}"
    return f"use --ratio {largest:g} or less{_or_no_grid(align)}"


def _on_grid(align: int | None) -> str:
    return "" if align is None else f" with --align {align}"


def _or_no_grid(align: int | None) -> str:
    return "" if align is None else "; --align none gives exact widths"
