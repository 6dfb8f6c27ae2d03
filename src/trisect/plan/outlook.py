"""What is planned against what was asked for: known before the work, and said then."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trisect.config import CompressConfig, Increase, Limit
from trisect.plan.budget import linear_parameters, linear_sizes
from trisect.plan.problem import problem_for
from trisect.records.parts import COMPONENTS, LINEARS
from trisect.records.plan import Plan, apply_plan
from trisect.records.shapes import ModelShape

UNITS = {
    "linear": "decoder weights",
    "params": "parameters",
    "kv": "KV bytes per token",
    "flops": "FLOPs",
    "latency": "nanoseconds",
    "maps": "weights of the maps that change",
    "masked": "weights that do not become zero (shapes stay)",
}
NOTABLE = 0.005
"""A distance from what was asked for that a finer grid is named for."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """A plan in what its goal counts, in the chosen parts of the chosen layers."""

    unit: str
    before: int
    allowed: int | None
    """What is left where the goal is met exactly; None where nothing says how much that is."""
    planned: int
    asked: float | None
    """The share to be removed, where the goal is one."""
    widths: Mapping[str, tuple[int, int]]
    """Component (or linear map) -> its narrowest and its widest width (or rank)."""
    finer: tuple[str, ...]
    """What lets a plan come nearer, as it is typed."""

    @property
    def removed(self) -> float:
        """The share of what there was that is planned to go."""
        return 1 - self.planned / self.before

    def counts(self) -> dict[str, Any]:
        """The numbers alone, ready for JSON."""
        return {name: getattr(self, name) for name in ("unit", "before", "allowed", "planned")}

    def __str__(self) -> str:
        widths = ", ".join(
            f"{name} {low}" if low == high else f"{name} {low}-{high}" for name, (low, high) in self.widths.items()
        )
        return f"{self._goal()} ({widths}){self._hint()}"

    def _goal(self) -> str:
        unit = UNITS["maps" if self.unit == "masked" else self.unit]
        if self.asked is not None:
            return f"asked to remove {self.asked:.1%}, planned {self.removed:.1%} of the {unit}"
        if self.allowed is not None:
            return f"asked for at most {self.allowed:,} {unit}, planned {self.planned:,}"
        return f"planned to remove {self.removed:.1%} of the {unit}"

    def _hint(self) -> str:
        if self.allowed is None or abs(self.planned - self.allowed) <= NOTABLE * self.before:
            return ""
        return f"; nearer: {' or '.join(self.finer)}" if self.finer else ""


def outlook(shape: ModelShape, config: CompressConfig, plan: Plan) -> Outlook:
    """What `plan`, made for `config`, comes to in a model of this shape."""
    return _of_ranks(shape, plan) if plan.linears else _of_widths(shape, config, plan)


def _of_widths(shape: ModelShape, config: CompressConfig, plan: Plan) -> Outlook:
    problem, goal = problem_for(shape, config), config.goal
    widths = {key: plan.layers[key[0]].of(key[1]) for key in problem.keys}
    by_part = {part: [w for key, w in widths.items() if key[1] == part] for part in COMPONENTS}
    return Outlook(
        unit=problem.costs.unit,
        before=problem.full + problem.fixed,
        allowed=None if isinstance(goal, Increase) else problem.budget + problem.fixed,
        planned=problem.cost(widths) + problem.fixed,
        asked=None if isinstance(goal, Increase | Limit) else goal.removed,
        widths={part: (min(found), max(found)) for part, found in by_part.items() if found},
        finer=_finer(config),
    )


def _of_ranks(shape: ModelShape, plan: Plan) -> Outlook:
    """Weights of the linear maps that the plan changes; a mask's are those that do not become zero.

    Every map follows its method's rule by itself, so there is no amount that is allowed to them together.
    """
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
        finer=(),
    )


def _finer(config: CompressConfig) -> tuple[str, ...]:
    """Options that give a plan more widths to choose from."""
    if config.portable:
        return (*(("--align 16",) if config.align == 32 else ()), "no --portable")
    if config.align is None:
        return ()
    return (*(f"--align {step}" for step in (16, 8) if step < config.align), "--align none")
