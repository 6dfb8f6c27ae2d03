"""What the figures of the page show: plans and losses, spectra, tuning."""

from collections.abc import Sequence
from typing import Any

from trisect.records.parts import even_ranks
from trisect.records.shapes import ModelShape, paired
from trisect.report import runs, terminal
from trisect.support.plots import Chart, HeatMap, Series
from trisect.support.receipt import Loss

ACROSS = 5  # layers whose spectra are shown, from the first to the last
FAINTEST = 1e-7  # of the largest share: what is below comes from rounding, and is not drawn


def plan_map(before: ModelShape, after: ModelShape, *, name: str = "plan", title: str = "") -> HeatMap:
    """Share that each component of each layer keeps."""
    pairs = paired(before, after)
    kept = terminal.kept_shares(before, after)
    rows = {part.upper(): shares for part, shares in kept.items()}
    widths = {part.upper(): [f"width {old.width(part)} to {new.width(part)}" for old, new in pairs] for part in kept}
    of = "parameters" if any(layer.linears for layer in after.layers) else "width"
    caption, unit = f"Share of {of} kept by each component, in per cent.", f"of its {of} kept"
    texts: Any = {"name": name, "title": title, "caption": caption, "unit": unit}
    return HeatMap(rows=rows, notes=widths, coldest=1, hottest=0, **texts)


def loss_map(run: runs.Run) -> list[HeatMap]:
    """Share of each local objective that is lost, as the solvers predicted it; no figure where nothing is known."""
    rows: dict[str, list[float | None]] = {}
    for loss in run.compression.losses:
        if loss.share is not None and loss.layer < len(run.after.layers):
            rows.setdefault(loss.component.upper(), [None] * len(run.after.layers))[loss.layer] = loss.share
    caption = "Share of each component's own objective that is lost on the calibration tokens, as its solver predicts "
    caption += "it, in per cent. Compare the layers of a row: different components and methods have no common unit."
    texts: Any = {"name": f"losses-{run.name}", "title": f"{run.name}: objective lost", "caption": caption}
    hottest = max((share for row in rows.values() for share in row if share is not None), default=0.0)
    return [HeatMap(rows=rows, unit="lost", coldest=0.0, hottest=hottest, **texts)] if rows else []


def tuning_chart(run: runs.Run) -> list[Chart]:
    """Loss by step of every fine-tuning."""
    curves = {time: tuning.losses for time, tuning in enumerate(run.tunings, start=1) if tuning.losses}
    series = [Series(label=f"tuning {n}", points=[*enumerate(line, start=1)]) for n, line in curves.items()]
    name, title = f"tuning-{run.name}", f"{run.name}: fine-tuning"
    caption, axes = "Loss on the tuning data, step by step.", ("step", "loss (nats per token)")
    return [Chart(name=name, title=title, caption=caption, axes=axes, series=series)] if series else []


def spectrum_charts(run: runs.Run) -> list[Chart]:
    """Per component, a line for each of some layers and a guide where it was cut."""
    parts: dict[str, list[Loss]] = {}
    for loss in run.compression.losses:
        if loss.spectrum and loss.spectrum.values[0] > 0:
            parts.setdefault(loss.component, []).append(loss)
    shown = {part: [loss for loss in there if loss.layer in across(there)] for part, there in parts.items()}
    return [_spectrum_chart(run, part, there) for part, there in shown.items()]


def across(losses: Sequence[Loss]) -> set[int]:
    """Layers from the first to the last in even steps, and the one that lost the largest share."""
    steps = {losses[at].layer for at in even_ranks(len(losses), ACROSS)}
    return steps | {max(losses, key=lambda loss: loss.share or 0.0).layer}


def _spectrum_chart(run: runs.Run, component: str, shown: Sequence[Loss]) -> Chart:
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
    carried = f"Share of the energy that each {unit} carries by itself, the largest first ({sorts}{added})"
    caption = f"{carried}. Left of the dashed line: as many as were kept."
    name, title = f"spectra-{component}-{run.name}", f"{run.name}: {component.upper()} spectra"
    axes = (f"rank (% of the {unit}s)", "share of the energy (%)")
    return Chart(name=name, title=title, caption=caption, axes=axes, series=lines, log_y=True)
