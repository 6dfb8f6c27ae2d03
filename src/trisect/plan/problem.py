"""What an allocator is given: which widths it may choose, what they cost, and how much there is to spend."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trisect.config import CompressConfig, Floors, Goal, Increase, Limit, Share, layer_out_of_range
from trisect.errors import TrisectError
from trisect.plan.budget import budget_of, compare
from trisect.plan.costs import Costs, read_latency
from trisect.records.parts import COMPONENTS
from trisect.records.plan import Plan, apply_plan
from trisect.records.shapes import LayerShape, LayerWidths, ModelShape, widths_of

MLP_STEPS = {8: 64, 16: 128, 32: 256}
"""Head step -> MLP step: what an MLP's GEMM tiles need beside heads of that step."""

MINIMUM_HEAD = 2
MINIMUM_MLP = 1


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Where one component's width may land."""

    width: int
    """The width now: always allowed, even off the grid, and never exceeded."""
    step: int
    """Distance of the grid's points; with `nearest` False, of the points rounded down to."""
    minimum: int
    nearest: bool
    """Go to the nearest point (ties down), or round to an integer and then down (exact ranks)."""

    def width_at(self, ratio: float) -> int:
        """The width with `ratio` of it removed; may lie below the minimum, which is an error."""
        # 1 - 0.3 is not 0.7 in binary; nine digits keep such dust from deciding a tie.
        target = round((1 - ratio) * self.width, 9)
        if not self.nearest:
            exact = round(target)
            return exact if exact == self.width else exact - exact % self.step
        below = int(target // self.step) * self.step
        above = min(below + self.step, self.width)
        return below if target - below <= above - target else above

    def at_least(self, share: float) -> int:
        """The narrowest allowed width that keeps this share, and never less than the minimum."""
        return max(self.minimum, self.up(math.ceil(round(share * self.width, 9))))

    def up(self, width: int) -> int:
        """The narrowest point of the grid that is not below `width`."""
        return min(self.width, -(-width // self.step) * self.step)

    def holds(self, ratio: float) -> bool:
        """Whether the width at this ratio is one that a model can have."""
        return self.width_at(ratio) >= self.minimum


def grid_of(layer: LayerShape, component: str, *, align: int | None) -> Grid:
    """The widths `component` may take in this layer."""
    width = layer.width(component)
    if align is None:
        rotary = component == "qk" and layer.pairs > 0
        smallest = MINIMUM_MLP if component == "mlp" else MINIMUM_HEAD
        return Grid(
            width=width,
            step=2 if rotary else 1,  # a rotation turns two channels, so they leave together
            minimum=min(smallest, width),
            nearest=False,
        )
    step = MLP_STEPS[align] if component == "mlp" else align
    return Grid(width=width, step=step, minimum=min(step, width), nearest=True)


def pairs_at(layer: LayerShape, *, qk: int) -> int:
    """Rotation pairs in a head narrowed to `qk`: exact with full RoPE, at most with partial."""
    return min(layer.pairs, qk // 2)


Key = tuple[int, str]
"""Layer and component."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Widths for `keys` that together cost `budget`, or as near to it as the grid has them.

    Never less where a share is to be removed (no more goes than was asked for), never more where a size is to
    be fitted. Everything else stays as it is.
    """

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
    tied: tuple[tuple[str, ...], ...] = ()
    """Components that have one width in all layers, by those that share it."""

    @property
    def at_least(self) -> bool:
        """Whether the budget is what has to be left, not what may be."""
        return isinstance(self.goal, Share)

    def fits(self, cost: int, budget: int) -> bool:
        """Whether a cost lies on the budget's right side."""
        return cost >= budget if self.at_least else cost <= budget

    def moving_with(self, part: str) -> tuple[str, ...]:
        """The components whose widths in all layers are one with this one's; none where layers may differ."""
        return next((parts for parts in self.tied if part in parts), ())

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
            raise TrisectError(f"The model already fits {self.goal}: it has {self.full + self.fixed:,}; ask for less.")
        if least <= self.budget:
            return
        if least == self.full:
            raise TrisectError(f"The model is too narrow to be cut at all{self._on_grid()}.")
        why = "the measured curves, the grid and the floors" if curved else "the grid and the floors"
        if isinstance(self.goal, Limit):
            raise TrisectError(
                f"{self.goal} cannot be reached: with these parts and layers, {why} leave "
                f"{least + self.fixed:,}; ask for that much or more."
            )
        most = self.full + self.fixed
        hundredths = 100 * (self.full - least) // most
        finer = "" if self.align is None or self.tied else ", or --align none"
        raise TrisectError(
            f"{str(self.goal).capitalize()} is out of reach: with these parts and layers, {why} "
            f"reach {hundredths / 100:.2f}; ask for less{', or --allocate uniform' if curved else finer}."
        )

    def check_removal(self, plan: Plan, smallest: int) -> None:
        """Refuse a plan that changes nothing; `smallest` is what the smallest step saves."""
        if plan.layers != tuple(map(widths_of, self.shape.layers)):
            return
        step = math.ceil(10_000 * smallest / (self.full + self.fixed)) / 10_000
        raise TrisectError(
            f"{str(self.goal).capitalize()} removes nothing: the smallest step of a width is {step:g}"
            f"{self._on_grid()}; ask for that much or more."
        )

    def _on_grid(self) -> str:
        return "" if self.align is None else f" with --align {self.align}; --align none gives exact widths"


@dataclass(frozen=True, kw_only=True)
class Planner:
    """One way of sharing out a problem's budget, ready for any amount of it."""

    least: int
    """The cost of the narrowest widths it can choose."""
    smallest: int
    """The least that a step from one of them to another saves."""
    at: Callable[[int], Plan]
    """Budget -> plan."""
    curved: bool
    """Whether it goes by loss curves, which end somewhere."""

    def solve(self, problem: Problem) -> Plan:
        """The plan for the problem's own budget."""
        problem.check_reach(self.least, curved=self.curved)
        plan = self.at(problem.budget)
        problem.check_removal(plan, self.smallest)
        return plan


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
        tied=_tied(config),
    )


def _tied(config: CompressConfig) -> tuple[tuple[str, ...], ...]:
    """Stock architectures have one width for heads, one for MLPs; shared frequencies need one for queries."""
    if config.portable:
        return ("qk", "ov"), ("mlp",)
    return (("qk",),) if config.rope_scope == "model" else ()


def pose(
    costs: Costs,
    *,
    goal: Goal,
    parts: Sequence[str],
    layers: Sequence[int] | None,
    align: int | None,
    method: str,
    floors: Floors | None = None,
    tied: tuple[tuple[str, ...], ...] = (),
) -> Problem:
    """The problem of reaching `goal` in these parts of these layers (None: all)."""
    shape = costs.shape
    chosen = chosen_layers(layers, num_layers=len(shape.layers))
    movable = {layer: set(parts) - set(shape.layers[layer].fixed) for layer in chosen}
    keys = tuple((layer, part) for layer in chosen for part in COMPONENTS if part in movable[layer])
    if not keys:
        raise TrisectError(f"None of the layers has {' or '.join(parts)} to narrow; name others with --parts.")
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
        tied=tied,
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
