"""A method as a record: one solver per component and the statistics it reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from trisect.errors import TrisectError
from trisect.methods.experts import EXPERT_READS, EXPERTS, choose_experts, solve_experts
from trisect.records.parts import COMPONENTS, LINEARS, Experts, Linear, Moments, Part, Shrunk, Slots, Solution

Solver = Callable[..., Solution]  # (part, moments, width, options) -> solution

RankRule = Callable[[int, int, int, float], int]
"""(inputs, outputs, heads, ratio) -> what `width` is for a linear map: a rank, or weights kept per output."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Numbers a user may set and every solver may read."""

    qk_norm_tolerance: float = 0.1
    """QK-norm layers whose corrected denominator misses more than this share (as a root) stay whole."""
    rope_scope: str = "head"
    """Who shares one set of rotation rates: the query heads of a key head, a layer, or the whole model."""
    refine: bool = False  # whether a3+ refits W_q, W_k and W_v as well
    without: tuple[str, ...] = ()  # pieces of a3+ to leave out, to see what they bring (`methods.a3plus.PIECES`)


def options_of(config: Any) -> Options:
    """The options among a run's settings."""
    return Options(**{entry.name: getattr(config, entry.name) for entry in fields(Options)})


@dataclass(frozen=True, kw_only=True)
class Method:
    """What a method reads and how it solves each part; one of the three kinds below."""

    name: str
    summary: str
    solvers: Mapping[str, Solver]  # component name, or name of a linear map -> solver
    reads: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Component name, or name of a linear map -> the moments its solver needs."""
    streams: str = "dense"
    """Where moments are gathered: on the "dense" stream; on the "narrow" one as it grows, component by
    component, with the dense one as target; or on "both", the second time as narrow_NAME."""
    allocate: str = "uniform"  # the allocation it has when the user names none
    ratio: float | None = None  # the only ratio it can have, if it has one (N:M masks)

    linear: ClassVar[bool] = False  # whether it takes linear maps one by one instead of components
    masks: ClassVar[bool] = False  # whether it puts zeros into linear maps and leaves their shapes

    @property
    def parts(self) -> tuple[str, ...]:
        """The components it changes."""
        return tuple(c for c in COMPONENTS if {c, *LINEARS[c]} & set(self.solvers))

    def reads_for(self, component: str) -> frozenset[str]:
        """The moments that a component, a linear map or the choice of experts is solved from."""
        return EXPERT_READS if component == EXPERTS else self.reads[component]

    def check_parts(self, parts: tuple[str, ...]) -> None:
        """Refuse parts that a method on components has no solver for; one on linear maps passes over them."""
        missing = [part for part in parts if part not in self.solvers]
        if missing and not self.linear:
            known = ",".join(self.parts)
            raise TrisectError(f"{self.name} has no solution for {', '.join(missing)}; use --parts {known}.")

    @property
    def in_order(self) -> bool:
        """Whether each layer is solved behind the layers solved before it."""
        return self.streams != "dense"


@dataclass(frozen=True, kw_only=True)
class ComponentMethod(Method):
    """A method that narrows QK, OV and MLP."""

    slot_reads: frozenset[str] = frozenset()
    """Moments of the dense layer that `slots` reads, gathered before the layer is solved."""
    slots: Callable[..., tuple[Slots, ...]] | None = None
    """(part, dense moments, width, options, shared) -> slots to be measured on the narrow stream for QK."""
    mixture: Solver | None = None  # solves all experts of a layer together; None solves each as an MLP of its own
    share: Callable[..., Any] | None = None
    """(layers, width, options) -> what all layers have to agree on beforehand (rope_scope "model")."""


@dataclass(frozen=True, kw_only=True)
class LinearMethod(Method):
    """A method that factors linear maps one by one."""

    linear: ClassVar[bool] = True

    rank: RankRule  # what a ratio means for one map
    groups: Callable[[int], int] | None = None
    """Heads -> groups that are factored by themselves, where there is more than one."""
    cached: bool = False  # keys and values are cached between their two factors
    search: str | None = None
    """How its paper spreads ranks over a model (`--allocate search`): by loss, sensitivity or fisher."""


@dataclass(frozen=True, kw_only=True)
class MaskMethod(LinearMethod):
    """A method that puts zeros into linear maps; shapes stay."""

    masks: ClassVar[bool] = True


def solve(
    method: Method, component: str, part: Part, moments: Moments, *, width: int, options: Options, **sharing: Any
) -> Solution:
    """Solve one part at one width; where nothing is cut or repaired, nothing is computed. `sharing` is of experts."""
    if component == EXPERTS:
        assert isinstance(part, Experts)
        return choose_experts(part, moments, width, options)
    if isinstance(part, Linear):
        # Ranks and kept weights go up to different numbers; the solvers know at which nothing is lost.
        return method.solvers[component](part, moments, width, options)
    if width == part.width and not (method.streams == "narrow" and moments):
        return Shrunk(part=part, loss=0.0, total=0.0, note="full width")
    if width > part.width:
        raise TrisectError(f"{component} has width {part.width} and cannot be widened to {width}; plan less.")
    solver = method.solvers[component]
    if isinstance(part, Experts):
        mixture = method.mixture if isinstance(method, ComponentMethod) else None
        solver = mixture or partial(solve_experts, solver, **sharing)
    return solver(part, moments, width, options)


def reads(**names: str) -> dict[str, frozenset[str]]:
    """What the solvers of components read, from the moments' names: reads(qk="q k", mlp="mlp")."""
    return {part: frozenset(text.split()) for part, text in names.items()}


def need(moments: Moments, name: str) -> Tensor:
    """A moment by name, or the command that collects it."""
    if name not in moments:
        have = ", ".join(sorted(moments)) or "none"
        collect = "`trisect calibrate MODEL -o moments.safetensors --method NAME` collects what a method needs"
        raise TrisectError(f"The calibration has no {name!r} moments (it has: {have}); {collect}.")
    return moments[name]
