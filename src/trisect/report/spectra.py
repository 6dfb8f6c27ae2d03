"""Spectra: what the channels or neurons of a layer carry, the largest first, and where they were cut."""

from collections.abc import Collection, Sequence

from trisect.report.drawing import Chart, Point, Series
from trisect.report.numbers import percent, short
from trisect.report.records import Loss, Run

ACROSS = 5
"""Layers that are shown where nobody chose any, from the first to the last."""
FAINTEST = 1e-7
"""Of the largest share: what is below comes from rounding, and is not drawn."""
EVERY = 4
"""One of so many points can be pointed at."""
CHANNEL = "channel"
UNITS = {"mlp": "neuron"}
"""What a component has ranks of, if not a head's channels."""


def spectrum_charts(run: Run, layers: Collection[int] | None = None) -> list[Chart]:
    """Per component, a line for each of some layers and a guide where it was cut."""
    known = [loss for loss in run.losses if loss.spectrum is not None]
    charts = []
    for component in dict.fromkeys(loss.component for loss in known):
        there = [loss for loss in known if loss.component == component]
        wanted = across(there) if layers is None else layers
        shown = [loss for loss in there if loss.layer in wanted]
        if shown:
            charts.append(_chart(run, component, shown))
    return charts


def across(losses: Sequence[Loss]) -> set[int]:
    """Layers from the first to the last in even steps, and the one that lost the largest share."""
    steps = {losses[round(n * (len(losses) - 1) / (ACROSS - 1))].layer for n in range(ACROSS)}
    return steps | {max(losses, key=lambda loss: loss.share or 0.0).layer}


def _chart(run: Run, component: str, losses: Sequence[Loss]) -> Chart:
    unit = UNITS.get(component, CHANNEL)
    lines = [Series(label=f"layer {loss.layer}", points=_points(loss, unit)) for loss in losses]
    shares = [point.y for line in lines for point in line.points]
    sorts = " or ".join(dict.fromkeys(loss.spectrum.of for loss in losses if loss.spectrum is not None))
    return Chart(
        name=f"spectra-{component}-{run.name}",
        title=f"{run.name}: {component.upper()} spectra",
        caption=f"Share of the energy that each {unit} carries by itself, the largest first ({sorts}"
        f"{', heads added up rank by rank' if unit == CHANNEL else ''}). Left of the dashed line: as many as "
        "were kept.",
        x_label=f"rank (% of the {unit}s)",
        y_label="share of the energy (%)",
        series=(*lines, *_cuts(losses, min(shares), max(shares))),
        log_y=True,
    )


def _points(loss: Loss, unit: str) -> tuple[Point, ...]:
    spectrum = loss.spectrum
    assert spectrum is not None
    points = []
    for number, (rank, share) in enumerate(zip(spectrum.ranks, spectrum.values, strict=True)):
        if share > FAINTEST * spectrum.values[0]:
            what = f"layer {loss.layer}, {unit} {rank + 1} of {spectrum.length}"
            tip = "" if number % EVERY else f"{what}: {short(100 * share)}% of the energy"
            points.append(Point(x=100 * (rank + 0.5) / spectrum.length, y=100 * share, tip=tip))
    return tuple(points)


def _cuts(losses: Sequence[Loss], low: float, high: float) -> list[Series]:
    """A vertical line at each width that was kept, with the layers that it is for where there are several."""
    kept: dict[tuple[int, int], list[Loss]] = {}
    for loss in losses:
        assert loss.spectrum is not None
        kept.setdefault((loss.width, loss.spectrum.length), []).append(loss)
    cuts = []
    for (width, length), where in kept.items():
        layers = f", layer {' '.join(str(loss.layer) for loss in where)}" if len(kept) > 1 else ""
        label = f"kept: {width} of {length} ({percent(width / length)}){layers}"
        ends = tuple(Point(x=100 * width / length, y=end, tip=label) for end in (low, high))
        cuts.append(Series(label=label, points=ends, marks=False, guide=True))
    return cuts
