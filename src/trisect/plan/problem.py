"""What an allocator is given: widths, costs and a budget; and what a plan comes to, against what was asked for."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trisect.config import CompressConfig, Increase, Limit, Share
from trisect.config.settings import layer_out_of_range
from trisect.errors import TrisectError
from trisect.plan.budget import Costs, budget_of, compare, linear_parameters, linear_sizes, read_latency
from trisect.records.plan import Plan, apply_plan
from trisect.records.shapes import COMPONENTS, LINEARS, WIDTH_FIELDS, LayerShape, ModelShape, widths_of

MLP_STEPS = {8: 64, 16: 128, 32: 256}  # head step -> MLP step: what an MLP's GEMM tiles need beside heads of that step
EXPERT_STEPS = {None: 8, 8: 32, 16: 64, 32: 128}
"""The same for experts; grouped products of 16-bit numbers want rows of 16 bytes, so no width is quite exact."""
MINIMUM_HEAD = 2


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Where one component's width may land."""

    width: int  # the width now: always allowed, even off the grid, and never exceeded
    step: int  # distance of the grid's points; with `nearest` False, of the points rounded down to
    minimum: int
    nearest: bool  # go to the nearest point (ties down), or round to an integer and then down (exact ranks)

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


def grid_of(layer: LayerShape, component: str, *, align: int | None) -> Grid:
    """The widths `component` may take in this layer."""
    width = layer.width(component)
    if component == "mlp" and layer.experts:
        # Eight points or more: small experts would have nowhere to go on a grid made for large ones.
        step = min(EXPERT_STEPS[align], max(EXPERT_STEPS[None], 1 << (width // 8).bit_length() - 1))
        return Grid(width=width, step=step, minimum=min(step, width), nearest=True)
    if align is None:
        rotary = component == "qk" and layer.pairs > 0
        smallest = 1 if component == "mlp" else MINIMUM_HEAD
        # A rotation turns two channels, so they leave together.
        return Grid(width=width, step=2 if rotary else 1, minimum=min(smallest, width), nearest=False)
    step = MLP_STEPS[align] if component == "mlp" else align
    return Grid(width=width, step=step, minimum=min(step, width), nearest=True)


Key = tuple[int, str]  # layer and component
CURVED = ("search", "balanced")  # the allocations that go by loss curves, which end somewhere


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Widths for `keys` that together cost `budget`, or as near to it as the grid has them.

    Never less where a share is to be removed (no more goes than was asked for), never more where a size is to
    be fitted. Everything else stays as it is.
    """

    shape: ModelShape
    config: CompressConfig
    keys: tuple[Key, ...]
    costs: Costs
    fixed: int  # what the goal counts but no width changes
    budget: int

    @property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Components that have one width in all layers, by those that share it."""
        # Stock architectures have one width for heads, one for MLPs; shared frequencies need one for queries.
        if self.config.portable:
            return ("qk", "ov"), ("mlp",)
        return (("qk",),) if self.config.rope_scope == "model" else ()

    @property
    def at_least(self) -> bool:
        """Whether the budget is what has to be left, not what may be."""
        return isinstance(self.config.goal, Share)

    def fits(self, cost: int, budget: int) -> bool:
        """Whether a cost lies on the budget's right side."""
        return cost >= budget if self.at_least else cost <= budget

    @property
    def full(self) -> int:
        """The cost of the keys as they are."""
        return sum(self.costs.full(*key) for key in self.keys)

    def grid(self, key: Key) -> Grid:
        return grid_of(self.shape.layers[key[0]], key[1], align=self.config.align)

    def lowest(self, key: Key) -> int:
        """The narrowest width the grid and the floors allow."""
        return self.grid(key).at_least(self.config.floor_of(key[1]))

    def cost(self, widths: Mapping[Key, int]) -> int:
        return sum(self.costs.of(*key, width) for key, width in widths.items())

    def plan(self, widths: Mapping[Key, int]) -> Plan:
        """The plan with these widths."""
        layers = list(map(widths_of, self.shape.layers))
        for (layer, part), width in widths.items():
            layers[layer] = replace(layers[layer], **{WIDTH_FIELDS[part]: width})
            if part == "qk":  # exact with full RoPE, at most with partial
                layers[layer] = replace(layers[layer], pairs=min(layers[layer].pairs, width // 2))
        plan = Plan(layers=tuple(layers), method=self.config.method, ratio=0.0, align=self.config.align)
        if isinstance(self.config.goal, Share) and self.config.goal.budget == "params":
            return replace(plan, ratio=self.config.goal.removed)
        # Other goals ask for no ratio, so the one reached stands there.
        removed = compare(budget_of(self.shape), budget_of(apply_plan(self.shape, plan)))
        return replace(plan, ratio=removed.ratio)

    def check_reach(self, least: int) -> None:
        """Refuse a budget below `least`, the cost of the narrowest widths, and a size the model has."""
        goal, limit = self.config.goal, isinstance(self.config.goal, Limit)
        if self.budget >= self.full and limit:
            raise TrisectError(f"The model already fits {goal}: it has {self.full + self.fixed:,}; ask for less.")
        if least <= self.budget:
            return
        if least == self.full:
            raise TrisectError(f"The model is too narrow to be cut at all{self._on_grid()}.")
        curved = self.config.allocate in CURVED
        why = "the measured curves, the grid and the floor" if curved else "the grid and the floor"
        if limit:
            leave = f"with these parts and layers, {why} leave {least + self.fixed:,}"
            raise TrisectError(f"{goal} cannot be reached: {leave}; ask for that much or more.")
        hundredths = 100 * (self.full - least) // (self.full + self.fixed)
        finer = "" if self.config.align is None or self.tied else ", or --align none"
        reach = f"with these parts and layers, {why} reach {hundredths / 100:.2f}"
        less = f"ask for less{', or --allocate uniform' if curved else finer}"
        raise TrisectError(f"{str(goal).capitalize()} is out of reach: {reach}; {less}.")

    def check_removal(self, plan: Plan, smallest: int) -> None:
        """Refuse a plan that changes nothing; `smallest` is what the smallest step saves."""
        if plan.layers != tuple(map(widths_of, self.shape.layers)):
            return
        step = math.ceil(10_000 * smallest / (self.full + self.fixed)) / 10_000
        smallest_step = f"the smallest step of a width is {step:g}{self._on_grid()}; ask for that much or more"
        raise TrisectError(f"{str(self.config.goal).capitalize()} removes nothing: {smallest_step}.")

    def _on_grid(self) -> str:
        align = self.config.align
        return "" if align is None else f" with --align {align}; --align none gives exact widths"


@dataclass(frozen=True, kw_only=True)
class Planner:
    """One way of sharing out a problem's budget, ready for any amount of it."""

    least: int  # the cost of the narrowest widths it can choose
    smallest: int  # the least that a step from one of them to another saves
    at: Callable[[int], Plan]  # budget -> plan


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
    chosen = chosen_layers(config.layers, num_layers=len(shape.layers))
    keys = tuple((layer, part) for layer in chosen for part in shape.layers[layer].components if part in config.parts)
    if not keys:
        raise TrisectError(f"None of the layers has {' or '.join(config.parts)} to narrow; name others with --parts.")
    full = sum(costs.full(*key) for key in keys)
    if isinstance(goal, Limit):
        fixed = costs.whole() - full
        budget = goal.most - fixed
    else:
        fixed = sum(costs.fixed(layer) for layer in chosen)
        budget = full if isinstance(goal, Increase) else goal.keeps(full + fixed) - fixed
    return Problem(shape=shape, config=config, keys=keys, costs=costs, fixed=fixed, budget=budget)


def chosen_layers(layers: Sequence[int] | None, *, num_layers: int) -> list[int]:
    """The layers a plan may change, in order."""
    for layer in layers or ():
        if not 0 <= layer < num_layers:
            raise layer_out_of_range(layer, num_layers=num_layers)
    return list(range(num_layers)) if layers is None else sorted(set(layers))


UNITS = {
    "linear": "decoder weights",
    "params": "parameters",
    "kv": "KV bytes per token",
    "flops": "FLOPs",
    "latency": "nanoseconds",
    "maps": "weights of the maps that change",
    "masked": "weights that do not become zero (shapes stay)",
}
NOTABLE = 0.005  # a distance from what was asked for that a finer grid is named for


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """A plan in what its goal counts, in the chosen parts of the chosen layers."""

    unit: str
    before: int
    allowed: int | None  # what is left where the goal is met exactly; None where nothing says how much that is
    planned: int
    asked: float | None  # the share to be removed, where the goal is one
    widths: Mapping[str, tuple[int, int]]  # component (or linear map) -> its narrowest and its widest width (or rank)
    finer: str  # what lets a plan come nearer, as it is typed

    @property
    def removed(self) -> float:
        """The share of what there was that is planned to go."""
        return 1 - self.planned / self.before

    def counts(self) -> dict[str, Any]:
        """The numbers alone, ready for JSON."""
        return {name: getattr(self, name) for name in ("unit", "before", "allowed", "planned")}

    def __str__(self) -> str:
        unit = UNITS["maps" if self.unit == "masked" else self.unit]
        goal = f"planned to remove {self.removed:.1%} of the {unit}"
        if self.asked is not None:
            goal = f"asked to remove {self.asked:.1%}, planned {self.removed:.1%} of the {unit}"
        elif self.allowed is not None:
            goal = f"asked for at most {self.allowed:,} {unit}, planned {self.planned:,}"
        spans = [f"{name} {low}" + (f"-{high}" if high > low else "") for name, (low, high) in self.widths.items()]
        far = self.allowed is not None and abs(self.planned - self.allowed) > NOTABLE * self.before
        hint = f"; nearer: {self.finer}" if far and self.finer else ""
        return f"{goal} ({', '.join(spans)}){hint}"


def outlook(shape: ModelShape, config: CompressConfig, plan: Plan) -> Outlook:
    """What `plan`, made for `config`, comes to in a model of this shape."""
    return _of_ranks(shape, plan) if plan.linears else _of_widths(shape, config, plan)


def _of_widths(shape: ModelShape, config: CompressConfig, plan: Plan) -> Outlook:
    problem, goal = problem_for(shape, config), config.goal
    widths = {key: plan.layers[key[0]].of(key[1]) for key in problem.keys}
    by_part = {part: [w for key, w in widths.items() if key[1] == part] for part in COMPONENTS}
    finer = {None: "", 8: "--align none"}.get(config.align, "--align 8 or --align none")  # more widths to choose from
    return Outlook(
        unit=problem.costs.unit,
        before=problem.full + problem.fixed,
        allowed=None if isinstance(goal, Increase) else problem.budget + problem.fixed,
        planned=problem.cost(widths) + problem.fixed,
        asked=None if isinstance(goal, Increase | Limit) else goal.removed,
        widths={part: (min(found), max(found)) for part, found in by_part.items() if found},
        finer="no --portable" if config.portable else finer,
    )


def _of_ranks(shape: ModelShape, plan: Plan) -> Outlook:
    """Weights of the linear maps that the plan changes; a mask's are those that do not become zero."""
    # Every map follows its method's rule by itself, so there is no amount that is allowed to them together.
    after = apply_plan(shape, plan)
    before = planned = 0
    ranks: dict[str, list[int]] = {}
    for old, new, linears in zip(shape.layers, after.layers, plan.linears, strict=True):
        for linear in linears:
            inputs, outputs = linear_sizes(old, linear.name)
            before += inputs * outputs
            planned += linear.rank * outputs if plan.masked else linear_parameters(new, linear.name)
            ranks.setdefault(linear.name, []).append(linear.rank)
    cached = any(linear.cached for linears in plan.linears for linear in linears)  # a ratio of the cache
    names = [name for part in COMPONENTS for name in LINEARS[part] if name in ranks]
    return Outlook(
        unit="masked" if plan.masked else "maps",
        before=before,
        allowed=None,
        planned=planned,
        asked=None if cached else plan.ratio,
        widths={name: (min(ranks[name]), max(ranks[name])) for name in names},
        finer="",
    )
