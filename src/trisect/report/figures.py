"""The figures of one run: its plan, what each component lost, its search and tuning; and the time of all."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trisect.records.parts import COMPONENTS
from trisect.report.drawing import Bars, Cell, Chart, HeatMap, Point, Series
from trisect.report.heatmap import kept_shares
from trisect.report.numbers import percent, short
from trisect.report.receipts import mapping, number
from trisect.report.records import Run


def plan_map(run: Run) -> HeatMap:
    """Share that each component of each layer keeps."""
    shares = kept_shares(run.before, run.after)
    factored = any(layer.linears for layer in run.after.layers)
    pairs = list(zip(run.before.layers, run.after.layers, strict=True))
    rows = []
    for component in COMPONENTS:
        cells = []
        for layer, ((old, new), share) in enumerate(zip(pairs, shares[component], strict=True)):
            width = f"kept, width {old.width(component)} to {new.width(component)}"
            what = "of its parameters kept" if new.linears else width
            tip = f"layer {layer}, {component.upper()}: {percent(share)} {what}"
            cells.append(Cell(value=share, text=f"{100 * share:.0f}", tip=tip))
        rows.append(tuple(cells))
    return HeatMap(
        name=f"plan-{run.name}",
        title=f"{run.name}: what each layer keeps",
        caption=f"Share of {'parameters' if factored else 'width'} kept by each component, in per cent.",
        rows=tuple(component.upper() for component in COMPONENTS),
        cells=tuple(rows),
        unit="share kept",
        coldest=1.0,
        hottest=0.0,
    )


def loss_map(run: Run) -> HeatMap | None:
    """Share of each local objective that is lost, as the solvers predicted it."""
    known = {(loss.layer, loss.component): loss for loss in run.losses if loss.share is not None}
    if not known:
        return None
    components = list(dict.fromkeys(component for _, component in known))
    layers = range(len(run.after.layers))
    rows: list[tuple[Cell | None, ...]] = []
    for component in components:
        cells: list[Cell | None] = []
        for layer in layers:
            loss = known.get((layer, component))
            if loss is None or loss.share is None:
                cells.append(None)
                continue
            note = f"; {loss.note}" if loss.note else ""
            lost = percent(loss.share, digits=2)
            tip = f"layer {layer}, {component.upper()} at {loss.width}: {lost} lost{note}"
            cells.append(Cell(value=loss.share, text=f"{100 * loss.share:.0f}", tip=tip))
        rows.append(tuple(cells))
    return HeatMap(
        name=f"losses-{run.name}",
        title=f"{run.name}: objective lost",
        caption="Share of each component's own objective that is lost on the calibration tokens, as its "
        "solver predicts it, in per cent. Objectives of different components have no common unit.",
        rows=tuple(component.upper() for component in components),
        cells=tuple(rows),
        unit="share lost",
        coldest=0.0,
        hottest=max(loss.share or 0.0 for loss in known.values()),
    )


def time_bars(runs: Sequence[Run]) -> Bars | None:
    """Seconds by stage, a bar per run."""
    timed = [run for run in runs if sum(run.timings.values()) > 0]
    if not timed:
        return None
    return Bars(
        name="time",
        title="Where the time went",
        caption="Share of each stage in a run's own time. Times of different machines do not compare.",
        unit="seconds",
        rows=tuple((run.name, run.timings) for run in timed),
        names=tuple(dict.fromkeys(stage for run in timed for stage in run.timings)),
    )


def trial_chart(run: Run) -> Chart | None:
    """The search for the smallest model within a bound on perplexity."""
    if not run.trials:
        return None
    groups = {"inside the bound": True, "outside": False}
    series = [
        Series(
            label=label,
            line=False,
            points=tuple(
                Point(
                    x=100 * trial.ratio,
                    y=trial.rise,
                    tip=f"{percent(trial.ratio)} removed: {short(trial.rise)} nats, {label}",
                )
                for trial in run.trials
                if trial.inside is inside
            ),
        )
        for label, inside in groups.items()
    ]
    return Chart(
        name=f"trials-{run.name}",
        title=f"{run.name}: models that were tried",
        caption="Rise of the loss on held-out calibration windows, for every model that was tried.",
        x_label="removed (%)",
        y_label="rise of the loss (nats per token)",
        series=tuple(entry for entry in series if entry.points),
    )


def tuning_chart(run: Run) -> Chart | None:
    """Loss by step of every fine-tuning."""
    series = []
    for time, tuning in enumerate(run.tunings, start=1):
        losses = _tuning_losses(tuning, run)
        points = tuple(
            Point(x=step, y=loss, tip=f"step {step}: {short(loss)}")
            for step, loss in enumerate(losses, start=1)
        )
        if points:
            series.append(Series(label=f"tuning {time}", points=points, marks=False))
    if not series:
        return None
    return Chart(
        name=f"tuning-{run.name}",
        title=f"{run.name}: fine-tuning",
        caption="Loss on the tuning data, step by step.",
        x_label="step",
        y_label="loss (nats per token)",
        series=tuple(series),
    )


def _tuning_losses(tuning: Any, run: Run) -> list[float]:
    where = f"{run.folder / 'receipt.json'}: a tuning"
    losses = mapping(tuning, where).get("losses")
    return [number(loss, where) for loss in losses] if isinstance(losses, list) else []


def name_of(source: str | None) -> str:
    """A model's name for people: the last part of its path."""
    return Path(source).name if source else "the dense model"
