"""Loss curves: what each component of each layer costs at a few widths. Measured once, for any budget."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.records.parts import COMPONENTS
from trisect.records.plan import Plan
from trisect.records.shapes import ModelShape
from trisect.support.checks import read_json, shown

ROW = ("layer", "component", "width", "loss")
TEXTS = {"fingerprint": None, "token_hash": None, "method": "a3+"}
"""What curves were measured on and with, and what files that do not say it mean."""
HIGHEST_LOSS = 500
"""Nats per token: a model that gives every token of the largest vocabulary the same chance has 17."""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Rise of the loss when one component of one layer is narrowed alone."""

    points: Mapping[tuple[int, str], Mapping[int, float]]
    """(layer, component) -> width -> rise of the mean loss in nats per token; the full width is 0."""
    fingerprint: str
    """Of the model they were measured on."""
    token_hash: str
    method: str = "a3+"
    """The method that narrowed the components."""
    dense_loss: float | None = None
    """The whole model's loss on the same windows, in nats per token; None in files that do not say."""

    def loss_at(self, layer: int, component: str, width: int) -> float:
        """The curve between its points: it never falls as the width does, and noise below zero is zero."""
        points = sorted(self.points[layer, component].items(), reverse=True)
        highest, previous = 0.0, points[0]
        for here, value in points:
            value = max(highest, value)
            if here <= width:
                span = previous[0] - here
                share = (previous[0] - width) / span if span else 0.0
                return highest + share * (value - highest)
            highest, previous = value, (here, value)
        raise TrisectError(
            f"The curve of {component} in layer {layer} ends at width {points[-1][0]}; {width} is below it. "
            "Use a smaller --ratio, or measure curves with lower widths."
        )

    def floor(self, layer: int, component: str) -> int:
        return min(self.points[layer, component])

    def rise(self, shape: ModelShape, plan: Plan) -> float:
        """The loss that a plan is predicted to add, in nats per token: what its components add alone."""
        narrowed = {
            (index, component): plan.layers[index].of(component)
            for index, layer in enumerate(shape.layers)
            for component in COMPONENTS
            if plan.layers[index].of(component) != layer.width(component)
        }
        self.check(shape, narrowed)
        if any(width < self.floor(*key) for key, width in narrowed.items()):
            return math.inf  # below the curves nothing is known
        return sum(self.loss_at(*key, width) for key, width in narrowed.items())

    def check(self, shape: ModelShape, keys: Iterable[tuple[int, str]]) -> None:
        """Refuse curves that do not have these components at this model's widths."""
        for layer, component in keys:
            if (layer, component) not in self.points:
                raise TrisectError(
                    f"The loss curves have none for {component} of layer {layer}; leave it out with --parts "
                    "or --layers, or name a new file with --curves, so that it is measured."
                )
            full, widest = shape.layers[layer].width(component), max(self.points[layer, component])
            if full != widest:
                raise TrisectError(
                    f"The loss curves start at width {widest} for {component} of layer {layer}, which has "
                    f"{full}: they are another model's; name a new file with --curves."
                )

    def to_dict(self) -> dict[str, Any]:
        """One row per point, ready for JSON; `read_curves` reads it."""
        rows = [
            {"layer": layer, "component": component, "width": width, "loss": loss}
            for (layer, component), curve in self.points.items()
            for width, loss in curve.items()
        ]
        return {
            "fingerprint": self.fingerprint,
            "token_hash": self.token_hash,
            "method": self.method,
            "dense_loss": self.dense_loss,
            "points": rows,
        }


def read_curves(path: str | Path, *, fingerprint: str | None = None) -> Curves:
    """Curves from a JSON file; with a fingerprint, only those measured on that model."""
    data = read_json(path)
    rows = data.get("points") if isinstance(data, dict) else None
    if not isinstance(rows, list):
        raise TrisectError(f"Cannot read loss curves from {path}: there is no list of points in it.")
    points: dict[tuple[int, str], dict[int, float]] = {}
    for number, row in enumerate(rows):
        layer, component, width, loss = _checked_row(row, where=f"{path}, point {number}")
        points.setdefault((layer, component), {})[width] = loss
    texts = {key: data.get(key, default) for key, default in TEXTS.items()}
    dense = data.get("dense_loss")
    if not all(isinstance(text, str) for text in texts.values()) or not (dense is None or _is_loss(dense)):
        raise TrisectError(
            f"Cannot read loss curves from {path}: {', '.join(TEXTS)} must be text, and dense_loss a number."
        )
    curves = Curves(points=points, dense_loss=dense, **texts)
    if fingerprint not in (None, curves.fingerprint):
        raise TrisectError(f"{path} holds the curves of another model; name a new file with --curves.")
    return curves


def _checked_row(row: Any, *, where: str) -> tuple[int, str, int, float]:
    """Layer, component, width and loss of a point, all of them possible."""
    values: list[Any] = [row.get(key) for key in ROW] if isinstance(row, dict) else [None] * len(ROW)
    layer, component, width, loss = values
    counted = type(layer) is int and layer >= 0 and type(width) is int and width > 0
    if not counted or not isinstance(component, str) or not _is_loss(loss):
        raise TrisectError(
            f"{where}: a curve's points have {', '.join(ROW)}: a count, a name, a count above 0 and a loss "
            f"below {HIGHEST_LOSS}, not {shown(row)}."
        )
    return layer, component, width, float(loss)


def _is_loss(value: Any) -> bool:
    return type(value) in (int, float) and -HIGHEST_LOSS < value < HIGHEST_LOSS
