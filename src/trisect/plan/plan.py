"""A plan: integers only, written as JSON, enough to resume from."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from trisect.errors import TrisectError, unknown_name
from trisect.shapes import LayerWidths, LinearShape, ModelShape


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
        _check_keys({"linears": (), "masked": False, **data}, cls, what="plan")
        for widths in data["layers"]:
            _check_keys(widths, LayerWidths, what="layer of a plan")
        return cls(
            layers=tuple(LayerWidths(**widths) for widths in data["layers"]),
            method=data["method"],
            ratio=data["ratio"],
            align=data["align"],
            linears=tuple(
                tuple(LinearShape(**linear) for linear in layer) for layer in data.get("linears", ())
            ),
            masked=data.get("masked", False),
        )


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


def _check_keys(data: Mapping[str, Any], record: type, *, what: str) -> None:
    known = [entry.name for entry in fields(record)]
    for key in data:
        if key not in known:
            raise unknown_name(f"key in a {what}", str(key), known)
    missing = [name for name in known if name not in data]
    if missing:
        raise TrisectError(f"A {what} needs the keys {', '.join(known)}; missing: {missing[0]}.")
