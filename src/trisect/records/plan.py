"""A plan: integers only, written as JSON, enough to resume from."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from trisect.errors import TrisectError, unknown_name
from trisect.records.shapes import LayerWidths, LinearShape, ModelShape
from trisect.support.checks import shown

Record = TypeVar("Record", LayerWidths, LinearShape)
LINEAR_DEFAULTS = {"groups": 1, "cached": False}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The widths of every layer after compression, untouched layers included."""

    layers: tuple[LayerWidths, ...]
    """`pairs` is exact for fully rotary heads. With partial RoPE it is "at most": the solver shares
    a narrow head between rotated and plain channels, and the pipeline puts the result here."""
    method: str
    ratio: float
    """The ratio asked for; what is really removed comes from the budget."""
    align: int | None
    linears: tuple[tuple[LinearShape, ...], ...] = ()
    """Per layer, the linear maps that become two, for methods that work on those; else nothing."""
    masked: bool = False
    """The ranks in `linears` count the weights each output keeps, and no shape changes."""

    def width(self, layer: int, component: str) -> int:
        """The width of a component, or the rank of a linear map."""
        if not self.linears:
            return self.layers[layer].of(component)
        return next(linear.rank for linear in self.linears[layer] if linear.name == component)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, ready for JSON."""
        data = asdict(self)
        data["layers"] = [asdict(widths) for widths in self.layers]
        data["linears"] = [[asdict(linear) for linear in layer] for layer in self.linears]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Plan":
        """The inverse of `to_dict`."""
        _check_keys(data, cls, what="plan", defaults={"linears": [], "masked": False})
        if not isinstance(data["layers"], list) or not isinstance(data.get("linears", []), list):
            raise TrisectError("A plan needs a list of layers, and one of linears where it has them.")
        plan = cls(
            layers=tuple(_record(LayerWidths, widths, what="layer of a plan") for widths in data["layers"]),
            method=data["method"],
            ratio=data["ratio"],
            align=data["align"],
            linears=tuple(_linears(layer) for layer in data.get("linears", [])),
            masked=data.get("masked", False),
        )
        plan._check()
        return plan

    def _check(self) -> None:
        if not isinstance(self.method, str) or not isinstance(self.masked, bool):
            raise TrisectError(f"A plan's method is a name and masked true or false, not {shown(self.method)}.")
        if type(self.ratio) not in (int, float) or not 0 <= self.ratio <= 1:
            raise TrisectError(f"A plan's ratio is from 0 to 1, not {shown(self.ratio)}.")
        if self.align is not None and not _is_count(self.align):
            raise TrisectError(f"A plan's align is a count or nothing, not {shown(self.align)}.")
        if self.linears and len(self.linears) != len(self.layers):
            raise TrisectError(f"A plan of {len(self.layers)} layers has linears for {len(self.linears)}.")


def apply_plan(shape: ModelShape, plan: Plan) -> ModelShape:
    """The shape a model has once the plan is carried out."""
    if len(plan.layers) != len(shape.layers):
        raise TrisectError(
            f"The plan is for {len(plan.layers)} layers, but the model has {len(shape.layers)}; "
            "make a plan for this model with `trisect compress MODEL --dry-run`."
        )
    layers = tuple(
        layer.with_widths(qk=widths.qk, pairs=widths.pairs, vo=widths.vo, mlp=widths.mlp)
        for layer, widths in zip(shape.layers, plan.layers, strict=True)
    )
    if plan.linears and not plan.masked:
        pairs = zip(layers, plan.linears, strict=True)
        layers = tuple(replace(layer, linears=linears) for layer, linears in pairs)
    return replace(shape, layers=layers)


def _linears(layer: Any) -> tuple[LinearShape, ...]:
    if not isinstance(layer, list):
        raise TrisectError(f"The linears of a layer of a plan are a list, not {shown(layer)}.")
    return tuple(
        _record(LinearShape, linear, what="linear map of a plan", defaults=LINEAR_DEFAULTS) for linear in layer
    )


def _record(record: type[Record], data: Any, *, what: str, defaults: Mapping[str, Any] | None = None) -> Record:
    """A record of counts, names and flags, every value of the kind that its field has."""
    _check_keys(data, record, what=what, defaults=defaults)
    kinds = {entry.name: entry.type for entry in fields(record)}
    for key, value in data.items():
        if not (_is_count(value) if kinds[key] is int else type(value) is kinds[key]):
            raise TrisectError(f"A {what} has {shown(value)} as its {key}.")
    return record(**data)


def _check_keys(data: Any, record: type[Any], *, what: str, defaults: Mapping[str, Any] | None = None) -> None:
    known = [entry.name for entry in fields(record)]
    if not isinstance(data, Mapping):
        raise TrisectError(f"A {what} needs the keys {', '.join(known)}, not {shown(data)}.")
    for key in data:
        if key not in known:
            raise unknown_name(f"key in a {what}", str(key), known)
    missing = [name for name in known if name not in {**(defaults or {}), **data}]
    if missing:
        raise TrisectError(f"A {what} needs the keys {', '.join(known)}; missing: {missing[0]}.")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31
