"""What an allocator is given: which widths it may choose, what they cost, and how much there is to spend."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trisect.config import CompressConfig, Floors, Goal, Increase, Limit, Share, layer_out_of_range
from trisect.errors import TrisectError
from trisect.parts import COMPONENTS
from trisect.plan.align import Grid, grid_of, pairs_at
from trisect.plan.budget import budget_of, compare
from trisect.plan.costs import Costs
from trisect.plan.latency import read_latency
from trisect.plan.plan import Plan, apply_plan
from trisect.shapes import LayerShape, LayerWidths, ModelShape, widths_of

Key = tuple[int, str]
"""Layer and component."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Widths for `keys` that cost at most `budget` together; everything else stays as it is."""

    shape: ModelShape
    keys: tuple[Key, ...]
    costs: Costs
    goal: Goal
    fixed: int
    """What the goal counts but no width changes."""
    budget: int
    align: int | None
    method: str
    floors: Floors = field(default_factory=Floors)

    @property
    def full(self) -> int:
        """The cost of the keys as they are."""
        return sum(self.costs.full(*key) for key in self.keys)

    def grid(self, key: Key) -> Grid:
        layer, part = key
        return grid_of(self.shape.layers[layer], part, align=self.align)

    def lowest(self, key: Key) -> int:
        """The narrowest width the grid and the floors allow."""
        return self.grid(key).at_least(self.floors.of(key[1]))

    def cost(self, widths: Mapping[Key, int]) -> int:
        return sum(self.costs.of(*key, width) for key, width in widths.items())

    def plan(self, widths: Mapping[Key, int]) -> Plan:
        """The plan with these widths."""
        layers = list(map(widths_of, self.shape.layers))
        for (layer, part), width in widths.items():
            layers[layer] = _with(layers[layer], self.shape.layers[layer], part, width)
        plan = Plan(layers=tuple(layers), method=self.method, ratio=0.0, align=self.align)
        if isinstance(self.goal, Share) and self.goal.budget == "params":
            return replace(plan, ratio=self.goal.removed)
        # Other goals ask for no ratio, so the one reached stands there.
        removed = compare(budget_of(self.shape), budget_of(apply_plan(self.shape, plan)))
        return replace(plan, ratio=removed.ratio)

    def check_reach(self, least: int, *, curved: bool) -> None:
        """Refuse a budget below `least`, the cost of the narrowest widths, and a size the model has."""
        if self.budget >= self.full and isinstance(self.goal, Limit):
            raise TrisectError(
                f"The model already fits {self.goal}: it has {self.full + self.fixed:,}; ask for less."
            )
        if least <= self.budget:
            return
        why = "the measured curves, the grid and the floors" if curved else "the grid and the floors"
        if isinstance(self.goal, Limit):
            raise TrisectError(
                f"{self.goal} cannot be reached: with these parts and layers, {why} leave "
                f"{least + self.fixed:,}; ask for that much or more."
            )
        most = self.full + self.fixed
        hundredths = 100 * (self.full - least) // most
        raise TrisectError(
            f"{str(self.goal).capitalize()} is out of reach: with these parts and layers, {why} "
            f"reach {hundredths / 100:.2f}; ask for less" + (", or --allocate uniform." if curved else ".")
        )


@dataclass(frozen=True, kw_only=True)
class Planner:
    """One way of sharing out a problem's budget, ready for any amount of it."""

    least: int
    """The cost of the narrowest widths it can choose."""
    at: Callable[[int], Plan]
    """Budget -> plan."""
    curved: bool
    """Whether it goes by loss curves, which end somewhere."""

    def solve(self, problem: Problem) -> Plan:
        problem.check_reach(self.least, curved=self.curved)
        return self.at(problem.budget)


def problem_for(shape: ModelShape, config: CompressConfig) -> Problem:
    """The planning problem that a config poses for a model."""
    goal = config.goal
    if goal.budget == "latency":
        assert config.latency_table is not None
        costs = Costs(shape=shape, unit="latency", table=read_latency(config.latency_table))
    else:
        # A ratio counts the decoder's matrices, as the paper does; a size counts everything there is.
        linear = goal.budget == "params" and not isinstance(goal, Limit)
        costs = Costs(shape=shape, unit="linear" if linear else goal.budget)
    return pose(
        costs,
        goal=goal,
        parts=config.parts,
        layers=config.layers,
        align=config.align,
        method=config.method,
        floors=config.floor,
    )


def pose(
    costs: Costs,
    *,
    goal: Goal,
    parts: Sequence[str],
    layers: Sequence[int] | None,
    align: int | None,
    method: str,
    floors: Floors | None = None,
) -> Problem:
    """The problem of reaching `goal` in these parts of these layers (None: all)."""
    shape = costs.shape
    chosen = chosen_layers(layers, num_layers=len(shape.layers))
    keys = tuple((layer, part) for layer in chosen for part in COMPONENTS if part in parts)
    full = sum(costs.full(*key) for key in keys)
    if isinstance(goal, Limit):
        fixed = costs.whole() - full
        budget = goal.most - fixed
    else:
        fixed = sum(costs.fixed(layer) for layer in chosen)
        budget = full if isinstance(goal, Increase) else goal.keeps(full + fixed) - fixed
    return Problem(
        shape=shape,
        keys=keys,
        costs=costs,
        goal=goal,
        fixed=fixed,
        budget=budget,
        align=align,
        method=method,
        floors=floors or Floors(),
    )


def chosen_layers(layers: Sequence[int] | None, *, num_layers: int) -> list[int]:
    """The layers a plan may change, in order."""
    for layer in layers or ():
        if not 0 <= layer < num_layers:
            raise layer_out_of_range(layer, num_layers=num_layers)
    return list(range(num_layers)) if layers is None else sorted(set(layers))


def _with(widths: LayerWidths, layer: LayerShape, component: str, width: int) -> LayerWidths:
    qk = width if component == "qk" else widths.qk
    return LayerWidths(
        qk=qk,
        pairs=pairs_at(layer, qk=qk),
        vo=width if component == "ov" else widths.vo,
        mlp=width if component == "mlp" else widths.mlp,
    )
