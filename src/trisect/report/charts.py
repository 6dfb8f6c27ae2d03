"""What the figures of the page show: plans and losses, spectra, loss curves, search, tuning, time, Pareto."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

from trisect.errors import TrisectError
from trisect.plan.curves import Curves
from trisect.records.parts import COMPONENTS, even_ranks
from trisect.records.plan import Plan
from trisect.records.shapes import ModelShape, paired, widths_of
from trisect.report.records import BITS, PARAMETERS, Kind, Loss, Quantity, Run
from trisect.report.terminal import kept_shares
from trisect.support.plots import Chart, Groups, HeatMap, Point, Series

ACROSS, FEW = 5, 8  # layers whose spectra are shown, from the first to the last; of so few, all
FAINTEST = 1e-7  # of the largest share: what is below comes from rounding, and is not drawn
SAME_COST = 1e-3  # files of the same weights differ by a few bytes
X_LABELS = {PARAMETERS: "parameters (millions)", BITS: "bits per dense parameter"}
RISE = "rise of the loss (nats per token)"


def plan_map(before: ModelShape, after: ModelShape, *, name: str = "plan", title: str = "") -> HeatMap:
    """Share that each component of each layer keeps."""
    pairs = paired(before, after)
    rows = {component.upper(): shares for component, shares in kept_shares(before, after).items()}
    widths = {
        name: [f"width {old.width(name.lower())} to {new.width(name.lower())}" for old, new in pairs] for name in rows
    }
    of = "parameters" if any(layer.linears for layer in after.layers) else "width"
    caption, unit = f"Share of {of} kept by each component, in per cent.", f"of its {of} kept"
    texts: Any = {"name": name, "title": title, "caption": caption, "unit": unit}
    return HeatMap(rows=rows, notes=widths, coldest=1, hottest=0, **texts)


def loss_map(run: Run) -> list[HeatMap]:
    """Share of each local objective that is lost, as the solvers predicted it; no figure where nothing is known."""
    rows: dict[str, list[float | None]] = {}
    for loss in run.compression.losses:
        if loss.share is not None and loss.layer < len(run.after.layers):
            rows.setdefault(loss.component.upper(), [None] * len(run.after.layers))[loss.layer] = loss.share
    caption = (
        "Share of each component's own objective that is lost on the calibration tokens, as its solver predicts "
        "it, in per cent. Compare the layers of a row: different components and methods have no common unit."
    )
    texts: Any = {"name": f"losses-{run.name}", "title": f"{run.name}: objective lost", "caption": caption}
    hottest = max((share for row in rows.values() for share in row if share is not None), default=0.0)
    return [HeatMap(rows=rows, unit="lost", coldest=0.0, hottest=hottest, **texts)] if rows else []


def time_bars(runs: Sequence[Run]) -> list[Groups]:
    """Seconds by stage, a group of bars per run."""
    bars = {run.name: run.timings for run in runs if sum(run.timings.values()) > 0}
    caption = "Seconds of each stage. Compare runs of one machine only."
    title = "Where the time went"
    return [Groups(name="time", title=title, caption=caption, y_label="seconds", groups=bars)] if bars else []


def trial_chart(run: Run) -> list[Chart]:
    """The search for the smallest model within a bound on perplexity."""
    groups: dict[str, list[Point]] = {}
    for trial in sorted(run.compression.trials, key=lambda trial: not trial.inside):
        label = "inside the bound" if trial.inside else "outside"
        groups.setdefault(label, []).append((100 * trial.ratio, trial.rise))
    series = [Series(label=label, line=False, points=points) for label, points in groups.items()]
    name, title = f"trials-{run.name}", f"{run.name}: models that were tried"
    caption = "Rise of the loss on held-out calibration windows, for every model that was tried."
    axes = ("removed (%)", RISE)
    return [Chart(name=name, title=title, caption=caption, axes=axes, series=series)] if series else []


def tuning_chart(run: Run) -> list[Chart]:
    """Loss by step of every fine-tuning."""
    curves = {time: tuning.losses for time, tuning in enumerate(run.tunings, start=1) if tuning.losses}
    series = [Series(label=f"tuning {n}", points=[*enumerate(line, start=1)]) for n, line in curves.items()]
    name, title = f"tuning-{run.name}", f"{run.name}: fine-tuning"
    caption, axes = "Loss on the tuning data, step by step.", ("step", "loss (nats per token)")
    return [Chart(name=name, title=title, caption=caption, axes=axes, series=series)] if series else []


def spectrum_charts(run: Run) -> list[Chart]:
    """Per component, a line for each of some layers and a guide where it was cut."""
    losses = run.compression.losses
    parts: dict[str, list[Loss]] = {}
    for loss in losses:
        if loss.spectrum and loss.spectrum.values[0] > 0:
            parts.setdefault(loss.component, []).append(loss)
    shown = {part: [loss for loss in there if loss.layer in across(there)] for part, there in parts.items()}
    return [_spectrum_chart(run, part, there) for part, there in shown.items()]


def across(losses: Sequence[Loss]) -> set[int]:
    """All of a few layers; else from the first to the last in even steps, and the one that lost the largest share."""
    if len(losses) <= FEW:
        return {loss.layer for loss in losses}
    steps = {losses[round(n * (len(losses) - 1) / (ACROSS - 1))].layer for n in range(ACROSS)}
    return steps | {max(losses, key=lambda loss: loss.share or 0.0).layer}


def _spectrum_chart(run: Run, component: str, shown: Sequence[Loss]) -> Chart:
    unit = "neuron" if component == "mlp" else "channel"
    spectra = [(loss, loss.spectrum) for loss in shown if loss.spectrum]
    lines = []
    kept: dict[tuple[int, int], list[int]] = {}
    for loss, spectrum in spectra:
        ranked = zip(even_ranks(spectrum.length, len(spectrum.values)), spectrum.values, strict=True)
        drawn = [(rank, share) for rank, share in ranked if share > FAINTEST * spectrum.values[0]]
        points = [(100 * (rank + 0.5) / spectrum.length, 100 * share) for rank, share in drawn]
        lines.append(Series(label=f"layer {loss.layer}", points=points))
        kept.setdefault((loss.width, spectrum.length), []).append(loss.layer)
    shares = [y for line in lines for _, y in line.points]
    for (width, length), layers in kept.items():
        where = f", layer {' '.join(map(str, layers))}" if len(kept) > 1 else ""
        label = f"kept: {width} of {length} ({width / length:.1%}){where}"
        ends = [(100 * width / length, end) for end in (min(shares), max(shares))]
        lines.append(Series(label=label, points=ends, guide=True))
    sorts = " or ".join(dict.fromkeys(spectrum.of for _, spectrum in spectra))
    added = ", heads added up rank by rank" if unit == "channel" else ""
    caption = (
        f"Share of the energy that each {unit} carries by itself, the largest first ({sorts}{added}). Left of the "
        "dashed line: as many as were kept."
    )
    name, title = f"spectra-{component}-{run.name}", f"{run.name}: {component.upper()} spectra"
    axes = (f"rank (% of the {unit}s)", "share of the energy (%)")
    return Chart(name=name, title=title, caption=caption, axes=axes, series=lines, log_y=True)


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
    deepest = max((layer for layer, _ in curves.points), default=0) or 1
    caption = (
        "Rise of the whole model's loss when this component of one layer is narrowed alone, "
        f"measured with {curves.method} on held-out calibration windows."
    )
    for component in COMPONENTS:
        series = []
        for (layer, part), values in sorted(curves.points.items()):
            if part == component:
                points = [(100 * width / max(values), loss) for width, loss in sorted(values.items())]
                series.append(Series(label=f"layer {layer}", depth=layer / deepest, points=points))
        if series:
            series += [_chosen_widths(curves, run, component) for run in runs if fits(curves, run)]
            name, title = f"curves-{component}", f"{component.upper()}: loss against width"
            shown, axes = [entry for entry in series if entry.points], ("width kept (%)", RISE)
            charts.append(Chart(name=name, title=title, caption=caption, axes=axes, series=shown))
    return charts


def _chosen_widths(curves: Curves, run: Run, component: str) -> Series:
    """Where a run's widths lie on the curves."""
    points = []
    for layer, (old, new) in enumerate(paired(run.before, run.after)):
        width, full = new.width(component), old.width(component)
        known = (layer, component) in curves.points and width >= curves.floor(layer, component)
        if known and width != full and not new.linears:
            points.append((100 * width / full, curves.loss_at(layer, component, width)))
    return Series(label=run.name, points=points, line=False)


def predicted_rise(curves: Curves, run: Run) -> float | None:
    """What the curves say a run loses; None where they do not reach, or are not about what was done."""
    only_narrowed = len(run.receipts) == 1 and not run.tunings and run.method == curves.method
    dropped = len(run.before.layers) != len(run.after.layers)
    if not fits(curves, run) or not only_narrowed or dropped or any(layer.linears for layer in run.after.layers):
        return None
    widths = tuple(map(widths_of, run.after.layers))
    try:
        rise = curves.rise(run.before, Plan(layers=widths, method=run.method, ratio=0.0, align=None))
    except TrisectError:  # a component that was narrowed has no curve
        return None
    return rise if math.isfinite(rise) else None


def prediction_chart(curves: Curves, runs: Sequence[Run]) -> list[Chart]:
    """The rise that the curves add up to against the rise that was measured, a point per run and text."""
    series = []
    for run in runs:
        predicted = predicted_rise(curves, run)
        for fact in run.facts:
            before, after = fact.before or math.inf, fact.after or math.inf
            known = math.isfinite(before) and math.isfinite(after)
            if fact.quantity.kind == Kind.PERPLEXITY and predicted is not None and known:
                points = [(predicted, math.log(after / before))]
                series.append(Series(label=f"{run.name}, {fact.quantity.name}", points=points, line=False))
    if not series:
        return []
    highest = max(value for each in series for point in each.points for value in point)
    series.append(Series(label="equal", points=[(0.0, 0.0), (highest, highest)], guide=True))
    caption = (
        "Predicted: what the curves say each component costs alone, added up. Measured: the logarithm of "
        "perplexity after over before, on the text named. On the line both agree."
    )
    axes = ("predicted rise of the loss (nats per token)", "measured rise (nats per token)")
    return [Chart(name="prediction", title="Predicted against measured", caption=caption, axes=axes, series=series)]


def pareto_charts(runs: Sequence[Run]) -> list[Chart]:
    """Perplexity against size, bits and latency, wherever two runs or more have both."""
    quantities = list(dict.fromkeys(fact.quantity for run in runs for fact in run.facts))
    texts = [quantity for quantity in quantities if quantity.kind == Kind.PERPLEXITY]
    costs = [PARAMETERS, BITS, *(quantity for quantity in quantities if quantity.kind == Kind.LATENCY)]
    pairs = product(enumerate(texts), enumerate(costs))
    charts = (_pareto_chart(runs, text, cost, name=f"pareto-{n}-{place}") for (n, text), (place, cost) in pairs)
    return [chart for several in charts for chart in several]


def _pareto_chart(runs: Sequence[Run], text: Quantity, cost: Quantity, *, name: str) -> list[Chart]:
    dense: dict[str, list[Point]] = {}
    compressed: dict[str, list[Point]] = {}
    for run in runs:
        y, x = run.fact(text), run.fact(cost)
        # A latency of the dense model is measured beside each run, and is never twice the same.
        known = dense.setdefault(f"{run.source_name} (dense)", [])
        known += [point for point in _spot(cost, x.before, y.before) if point not in known]
        compressed[run.name] = _spot(cost, x.after, y.after)
    if sum(map(bool, compressed.values())) < 2:
        return []
    models = {label: points for label, points in {**dense, **compressed}.items() if points}
    front = pareto_front([point for points in models.values() for point in points])
    series = [Series(label=label, points=points, line=False) for label, points in models.items()]
    series.append(Series(label="front", points=front, guide=True))
    details = "; ".join(detail for detail in (text.detail, cost.detail) if detail)
    caption = f"Lower left is better; the line joins what nothing else beats. {details}."
    axes = (X_LABELS.get(cost, f"{cost.name} ({cost.unit})"), "perplexity")
    title = f"{text.name} against {cost.name}"
    return [Chart(name=name, title=title, caption=caption, axes=axes, series=series, log_y=True)]


def _spot(cost: Quantity, x: float | None, y: float | None) -> list[Point]:
    """A model's place, where both of its numbers are known."""
    if x is None or y is None or not math.isfinite(y):
        return []
    return [(x / 1e6 if cost == PARAMETERS else x, y)]


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Points that no other beats in both, by cost; costs that differ by next to nothing are the same."""

    def beats(one: Point, other: Point) -> bool:
        cheaper = one[0] < other[0] * (1 - SAME_COST)
        return one[1] < other[1] and one[0] <= other[0] * (1 + SAME_COST) or (cheaper and one[1] == other[1])

    return [point for point in sorted(set(points)) if not any(beats(other, point) for other in points)]
