"""A plan: integers only, written as JSON, enough to resume from."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from trisect.errors import TrisectError, check_names
from trisect.records.shapes import LayerWidths, LinearShape, ModelShape
from trisect.support.checks import first_problem

WIDEST = 1 << 24  # far above every width there is
AnyRecord = TypeVar("AnyRecord")


def with_widths(record: AnyRecord) -> AnyRecord:
    """A record of widths from a file, whose integers are some."""
    # Here, because the modelling file of a saved folder holds shapes.py and has no pydantic.
    for name, value in vars(record).items():
        if isinstance(value, int) and not 0 <= value <= WIDEST:
            raise ValueError(f"{name} must be a width from 0 to {WIDEST:,}, not {value}")
    return record


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The widths of every layer after compression, untouched layers included."""

    layers: tuple[Annotated[LayerWidths, AfterValidator(with_widths)], ...]
    """`pairs` is exact for fully rotary heads. With partial RoPE it is "at most": the solver shares
    a narrow head between rotated and plain channels, and the pipeline puts the result here."""
    method: str
    ratio: Annotated[float, Field(ge=0, le=1)]  # the ratio asked for; what is really removed comes from the budget
    align: Annotated[int, Field(ge=0, le=WIDEST)] | None
    linears: tuple[tuple[Annotated[LinearShape, AfterValidator(with_widths)], ...], ...] = ()
    """Per layer, the linear maps that become two, for methods that work on those; else nothing."""
    masked: bool = False  # the ranks in `linears` count the weights each output keeps, and no shape changes

    def width(self, layer: int, component: str) -> int:
        """The width of a component, or the rank of a linear map."""
        if not self.linears:
            return self.layers[layer].of(component)
        return next(linear.rank for linear in self.linears[layer] if linear.name == component)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, ready for JSON."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return found

    @classmethod
    def from_dict(cls, data: Any) -> "Plan":
        """The inverse of `to_dict`; what does not fit is named."""
        if isinstance(data, Mapping):
            check_names("key in a plan", map(str, data), [entry.name for entry in fields(cls)])
        try:
            plan = TypeAdapter(cls).validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            raise TrisectError(f"A plan that cannot be used: {first_problem(error)}") from error
        if plan.linears and len(plan.linears) != len(plan.layers):
            raise TrisectError(f"A plan of {len(plan.layers)} layers has linears for {len(plan.linears)}.")
        return plan


def apply_plan(shape: ModelShape, plan: Plan) -> ModelShape:
    """The shape a model has once the plan is carried out."""
    if len(plan.layers) != len(shape.layers):
        other = f"The plan is for {len(plan.layers)} layers, but the model has {len(shape.layers)}"
        raise TrisectError(f"{other}; make a plan for this model with `trisect compress MODEL --dry-run`.")
    layers = [replace(x, **vars(widths)) for x, widths in zip(shape.layers, plan.layers, strict=True)]
    if plan.linears and not plan.masked:
        layers = [replace(x, linears=linears) for x, linears in zip(layers, plan.linears, strict=True)]
    return replace(shape, layers=tuple(layers))
