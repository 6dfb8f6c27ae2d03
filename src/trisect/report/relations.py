"""Figures across runs: loss curves with the plans on them, predicted against measured, and Pareto fronts."""

import math
from collections.abc import Mapping, Sequence

from trisect.plan.curves import Curves
from trisect.records.parts import COMPONENTS
from trisect.records.plan import Plan
from trisect.records.shapes import widths_of
from trisect.report.drawing import Chart, Point, Series
from trisect.report.facts import BITS, PARAMETERS
from trisect.report.figures import name_of
from trisect.report.numbers import short
from trisect.report.records import LATENCY, PERPLEXITY, Quantity, Run

SAME_COST = 1e-3
"""Files of the same weights differ by a few bytes."""
X_LABELS = {PARAMETERS: "parameters (millions)", BITS: "bits per dense parameter"}


def fits(curves: Curves, run: Run) -> bool:
    """Whether the curves start at the widths of the model that the run was made from."""
    layers = run.before.layers
    return all(
        layer < len(layers) and component in COMPONENTS and layers[layer].width(component) == max(points)
        for (layer, component), points in curves.points.items()
    )


def curve_charts(curves: Curves, runs: Sequence[Run]) -> list[Chart]:
    """Per component, a line per layer, and on them the widths that each run chose."""
    charts = []
    for component in COMPONENTS:
        lines = {layer: points for (layer, part), points in curves.points.items() if part == component}
        if not lines:
            continue
        deepest = max(1, *lines)
        series = [
            Series(
                label=f"layer {layer}",
                depth=layer / deepest,
                points=_curve(points, f"layer {layer}, {component.upper()}"),
            )
            for layer, points in sorted(lines.items())
        ]
        series += [_chosen(curves, run, component) for run in runs if fits(curves, run)]
        charts.append(
            Chart(
                name=f"curves-{component}",
                title=f"{component.upper()}: loss against width",
                caption="Rise of the whole model's loss when this component of one layer is narrowed alone, "
                f"measured with {curves.method} on held-out calibration windows.",
                x_label="width kept (%)",
                y_label="rise of the loss (nats per token)",
                series=tuple(entry for entry in series if entry.points),
            )
        )
    return charts


def _curve(values: Mapping[int, float], label: str) -> tuple[Point, ...]:
    full = max(values)
    return tuple(
        Point(x=100 * width / full, y=loss, tip=f"{label} at width {width} of {full}: {short(loss)} nats")
        for width, loss in sorted(values.items())
    )


def _chosen(curves: Curves, run: Run, component: str) -> Series:
    """Where a run's widths lie on the curves."""
    points = []
    for layer, (old, new) in enumerate(zip(run.before.layers, run.after.layers, strict=True)):
        width, full = new.width(component), old.width(component)
        known = (layer, component) in curves.points and width >= curves.floor(layer, component)
        if known and width != full and not new.linears:
            loss = curves.loss_at(layer, component, width)
            tip = f"{run.name}, layer {layer}: width {width} of {full}, {short(loss)} nats on the curve"
            points.append(Point(x=100 * width / full, y=loss, tip=tip))
    return Series(label=run.name, points=tuple(points), line=False)


def predicted_rise(curves: Curves, run: Run) -> float | None:
    """What the curves say a run loses; None where they do not reach, or are not about what was done."""
    only_narrowed = len(run.receipts) == 1 and not run.tunings and run.method == curves.method
    if not fits(curves, run) or not only_narrowed or any(layer.linears for layer in run.after.layers):
        return None
    narrowed = {
        (index, component)
        for index, (old, new) in enumerate(zip(run.before.layers, run.after.layers, strict=True))
        for component in COMPONENTS
        if old.width(component) != new.width(component)
    }
    if not narrowed <= set(curves.points):
        return None
    plan = Plan(
        layers=tuple(map(widths_of, run.after.layers)), method=run.method, ratio=run.ratio, align=None
    )
    rise = curves.rise(run.before, plan)
    return rise if math.isfinite(rise) else None


def prediction_chart(curves: Curves, runs: Sequence[Run]) -> Chart | None:
    """The rise that the curves add up to against the rise that was measured, a point per run and text."""
    found: dict[str, list[Point]] = {}
    for run in runs:
        predicted = predicted_rise(curves, run)
        for fact in run.facts:
            if fact.quantity.kind != PERPLEXITY or predicted is None or fact.before is None:
                continue
            if fact.after is not None and math.isfinite(fact.after) and math.isfinite(fact.before):
                measured = math.log(fact.after / fact.before)
                both = f"{short(predicted)} predicted, {short(measured)} measured"
                tip = f"{run.name}, {fact.quantity.name}: {both}"
                found.setdefault(run.name, []).append(Point(x=predicted, y=measured, tip=tip))
    if not found:
        return None
    series = [Series(label=name, points=tuple(points), line=False) for name, points in found.items()]
    highest = max(max(point.x, point.y) for points in found.values() for point in points)
    ends = (Point(x=0.0, y=0.0, tip="equal"), Point(x=highest, y=highest, tip="equal"))
    return Chart(
        name="prediction",
        title="Predicted against measured",
        caption="Predicted: what the curves say each component costs alone, added up. Measured: the "
        "logarithm of perplexity after over before, on the text named. On the line both agree.",
        x_label="predicted rise of the loss (nats per token)",
        y_label="measured rise (nats per token)",
        series=(*series, Series(label="equal", points=ends, marks=False, guide=True)),
    )


def pareto_charts(runs: Sequence[Run]) -> list[Chart]:
    """Perplexity against size, bits and latency, wherever two runs or more have both."""
    quantities = list(dict.fromkeys(fact.quantity for run in runs for fact in run.facts))
    texts = [quantity for quantity in quantities if quantity.kind == PERPLEXITY]
    costs = [PARAMETERS, BITS, *(quantity for quantity in quantities if quantity.kind == LATENCY)]
    charts = []
    for number, text in enumerate(texts):
        for place, cost in enumerate(costs):
            chart = _pareto(runs, text, cost, name=f"pareto-{number}-{place}")
            if chart is not None:
                charts.append(chart)
    return charts


def _pareto(runs: Sequence[Run], text: Quantity, cost: Quantity, *, name: str) -> Chart | None:
    narrow: list[Series] = []
    dense: dict[str, list[Point]] = {}
    for run in runs:
        y, x = run.fact(text), run.fact(cost)
        if y is None or x is None:
            continue
        source = f"{name_of(run.source)} (dense)"
        was, now = _spot(source, cost, x.before, y.before), _spot(run.name, cost, x.after, y.after)
        # A latency of the dense model is measured beside each run, and is never twice the same.
        if was is not None and was not in dense.setdefault(source, []):
            dense[source].append(was)
        if now is not None:
            narrow.append(Series(label=run.name, points=(now,), line=False))
    if len(narrow) < 2:
        return None
    both = [
        Series(label=label, points=tuple(points), line=False) for label, points in dense.items() if points
    ]
    both += narrow
    details = "; ".join(detail for detail in (text.detail, cost.detail) if detail)
    return Chart(
        name=name,
        title=f"{text.name} against {cost.name}",
        caption=f"Lower left is better; the line joins what nothing else beats. {details}.",
        x_label=_cost_label(cost),
        y_label="perplexity",
        series=(*both, _front([point for entry in both for point in entry.points])),
        log_y=True,
    )


def _spot(label: str, cost: Quantity, x: float | None, y: float | None) -> Point | None:
    """A model's place, where both of its numbers are known."""
    if x is None or y is None or not math.isfinite(y):
        return None
    x = x / 1e6 if cost == PARAMETERS else x
    return Point(x=x, y=y, tip=f"{label}: perplexity {y:.3f}; {_cost_label(cost)} {short(x)}")


def _cost_label(cost: Quantity) -> str:
    return X_LABELS.get(cost, f"{cost.name} ({cost.unit})")


def _front(points: Sequence[Point]) -> Series:
    """Points that no other beats in both; costs that differ by next to nothing are the same."""
    kept = [
        point
        for point in sorted(points, key=lambda point: (point.x, point.y))
        if not any(_beats(other, point) for other in points)
    ]
    return Series(label="front", points=tuple(kept), marks=False, guide=True)


def _beats(one: Point, other: Point) -> bool:
    cheaper = one.x < other.x * (1 - SAME_COST)
    return one.y < other.y and one.x <= other.x * (1 + SAME_COST) or (cheaper and one.y == other.y)
