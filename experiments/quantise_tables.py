"""Fewer bits on dense and narrow models: what docs/quantize.md and docs/results.md show of it."""

import math
from dataclasses import dataclass
from functools import partial

from figures import MARKERS, Plot
from tables import Entry, rows_of, sourced, table

STUDIES = {"stories15m": "stories15m, TinyStories", "smollm2": "SmolLM2-135M, WikiText-2 test"}
"""Results of quantise_pareto.py, and what a figure of them is about."""
LINE_ENDS = 6.0
"""Figures are about fewer bits than this."""


@dataclass(frozen=True)
class Point:
    """One model in one number of bits."""

    base: str
    removed: float
    """Share of the decoder's weights."""
    setting: str
    bits: float
    """Per weight of the dense decoder, scales and zeros included."""
    perplexity: float

    @property
    def pure(self) -> bool:
        return self.base == "dense" and self.setting != "whole"

    @property
    def mixed(self) -> bool:
        return self.base != "dense" and self.setting != "whole"

    @property
    def model(self) -> str:
        """Method and share removed, which is not the ratio: widths are multiples."""
        method = self.base.rpartition("-")[0]
        return f"{method} {self.removed:.1%}" if method else self.base

    @property
    def name(self) -> str:
        bits, _, group = self.setting.partition("-")
        held = "" if bits == "whole" else f", HQQ {bits[1:]} bits, groups {group.removeprefix('g')}"
        return self.model + held


def study_rows(study: str) -> list[Entry]:
    return [row for row in rows_of("quantise.json") if row["study"] == study]


def points(study: str) -> list[Point]:
    """Every row of a study, most bits first."""
    made = []
    for row in study_rows(study):
        bits = row["bits"]
        removed = 1 - bits["decoder_weights"] / bits["original_decoder_weights"]
        perplexity = row["perplexity"]["perplexity"]
        made.append(Point(row["base"], removed, row["setting"], bits["per_original_weight"], perplexity))
    return sorted(made, key=lambda point: (-point.bits, point.perplexity))


def pure_line(points: list[Point]) -> list[Point]:
    """Pure HQQ, without what has more bits and more perplexity than another; fewest bits first."""
    line: list[Point] = []
    for point in sorted(points, key=lambda point: (point.bits, point.perplexity)):
        if point.pure and (not line or point.perplexity < line[-1].perplexity):
            line.append(point)
    return line


def line_at(line: list[Point], bits: float) -> float | None:
    """The line, straight between its points in log perplexity as it is drawn; None beyond its ends."""
    for low, high in zip(line, line[1:], strict=False):
        if low.bits <= bits <= high.bits:
            share = (bits - low.bits) / (high.bits - low.bits)
            return math.exp((1 - share) * math.log(low.perplexity) + share * math.log(high.perplexity))
    return None


def pareto(study: str) -> str:
    """Bits per original weight against perplexity."""
    every = points(study)
    line = pure_line(every)
    lines = []
    for point in every:
        there = line_at(line, point.bits) if point.mixed else None
        side = "" if there is None else "below" if point.perplexity < there else "above"
        beside = "-" if there is None else f"{there:.2f} ({side} it)"
        lines.append([point.name, f"{point.bits:.2f}", f"{point.perplexity:.2f}", beside])
    header = ["model", "bits per weight of the dense decoder", "perplexity", "line of pure HQQ there"]
    command = f"python experiments/quantise_pareto.py {study}"
    return sourced(table(header, lines), study_rows(study), command)


def orthogonal(study: str) -> str:
    """What four bits cost the dense model and the narrow ones."""
    known = {(point.base, point.setting): point for point in points(study)}
    lines = []
    for base in sorted({base for base, _ in known}, key=_dense_first):
        if {(base, "whole"), (base, "b4-auto")} <= known.keys():
            whole, four = known[base, "whole"], known[base, "b4-auto"].perplexity
            was = whole.perplexity
            lines.append([whole.model, f"{was:.2f}", f"{four:.2f}", f"{four - was:+.2f}", f"x{four / was:.3f}"])
    return table(["model", "whole", "HQQ 4 bits", "increase", "factor"], lines)


def kv() -> str:
    """Attention's weights and the KV cache in the same number of bits."""
    rows = rows_of("quantise-stories-mpt.json")
    rows.sort(key=lambda row: (row["method"] or "", -(row["bits"] or 16), row["ratio"] or 0))
    dense = next(r["perplexity"]["perplexity"] for r in rows if r["method"] is None and r["bits"] is None)
    lines = []
    for row in rows:
        value, held, cache = row["perplexity"]["perplexity"], row["attention"], row["cache"]
        factors = [f"{held['removed']:.1%}", f"{held['factor']:.2f}x", f"{cache['factor']:.2f}x"]
        lines.append(
            [_kv_name(row), *factors, f"{cache['bytes_per_token']:,.0f}", f"{value:.2f} ({value - dense:+.2f})"]
        )
    header = ["method", "attention removed", "attention weights", "KV cache", "KV bytes per token", "perplexity"]
    return sourced(table(header, lines), rows, "python experiments/quantise_stories_mpt.py")


def _kv_name(row: Entry) -> str:
    cut = "dense" if row["method"] is None else f"{row['method']} @ {row['ratio']:.0%}"
    if row["bits"] is None:
        return cut
    return f"{row['bits']}-bit HQQ" + ("" if row["method"] is None else f" + {cut}")


def pareto_figure(study: str, plot: Plot) -> None:
    """Pure HQQ as a line, narrow quantised models as points."""
    every = [point for point in points(study) if point.setting != "whole" and point.bits < LINE_ENDS]
    line = pure_line(every)
    plot.axes.plot([p.bits for p in line], [p.perplexity for p in line], color="0.5", label="pure HQQ")
    for at, base in enumerate(sorted({point.base for point in every}, key=_dense_first)):
        these = [point for point in every if point.base == base]
        label = "pure HQQ, each setting" if base == "dense" else f"{these[0].model} + HQQ"
        colour = "0.5" if base == "dense" else f"C{at}"
        x, y = [p.bits for p in these], [p.perplexity for p in these]
        plot.axes.plot(x, y, marker=MARKERS[at], linestyle="", color=colour, label=label)
    plot.axes.set_yscale("log")
    plot.label(STUDIES[study], "bits per weight of the dense decoder", "perplexity")


def exports() -> str:
    """A stock export in other quantisers' bits."""
    rows = sorted(rows_of("quantise-export.json"), key=lambda row: -row["bytes"])
    lines = [[row["name"], f"{row['bytes'] / 1e6:.1f} MB", f"{row['perplexity']:.2f}"] for row in rows]
    command = "python experiments/quantise_export.py measure runs/stories-evaluation.txt FOLDER"
    return sourced(table(["folder", "weights", "perplexity in vLLM, bfloat16"], lines), rows, command)


def _dense_first(base: str) -> tuple[bool, str]:
    return base != "dense", base


TABLES = {
    **{f"quantise-orthogonal-{study}": partial(orthogonal, study) for study in STUDIES},
    **{f"quantise-pareto-{study}": partial(pareto, study) for study in STUDIES},
    "quantise-kv": kv,
    "quantise-export": exports,
}
FIGURES = {f"quantise-{study}": partial(pareto_figure, study) for study in STUDIES}
