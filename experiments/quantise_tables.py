"""The tables of docs/quantize.md and their figures; `make results` writes them."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import tables

DOCUMENT = tables.ROOT / "docs" / "quantize.md"
STUDIES = {"stories15m": "stories15m, TinyStories", "smollm2": "SmolLM2-135M, WikiText-2 test"}
"""Results of quantise_pareto.py, and what a figure of them is about."""
LINE_ENDS = 6.0
"""Figures are about fewer bits than this."""


@dataclass(frozen=True)
class Point:
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
        """What was really removed, not what was asked for: widths are multiples."""
        method = self.base.rpartition("-")[0]
        return f"{method} {self.removed:.1%}" if method else self.base

    @property
    def name(self) -> str:
        bits, _, group = self.setting.partition("-")
        held = "" if bits == "whole" else f", HQQ {bits[1:]} bits, groups {group.removeprefix('g')}"
        return self.model + held


def points(study: str) -> list[Point]:
    """Every receipt of a study, most bits first."""
    found = []
    for entry in _read(f"quantise-{study}"):
        bits = entry["bits"]
        removed = 1 - bits["decoder_weights"] / bits["original_decoder_weights"]
        at, perplexity = bits["per_original_weight"], entry["perplexity"]["perplexity"]
        found.append(Point(entry["base"], removed, entry["setting"], at, perplexity))
    return sorted(found, key=lambda point: (-point.bits, point.perplexity))


def pure_line(found: list[Point]) -> list[Point]:
    """Pure HQQ, without what has more bits and more perplexity than another; fewest bits first."""
    line: list[Point] = []
    for point in sorted(found, key=lambda point: (point.bits, point.perplexity)):
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


def pareto_table(study: str) -> str:
    """Bits per original weight against perplexity."""
    found = points(study)
    line = pure_line(found)
    rows = [
        "| model | bits per weight of the dense decoder | perplexity | line of pure HQQ there |",
        "|---|---|---|---|",
    ]
    for point in found:
        there = line_at(line, point.bits) if point.mixed else None
        told = (
            "-" if there is None else f"{there:.2f} ({'below' if point.perplexity < there else 'above'} it)"
        )
        rows.append(f"| {point.name} | {point.bits:.2f} | {point.perplexity:.2f} | {told} |")
    return "\n".join(rows)


def orthogonal_table(study: str) -> str:
    """What four bits cost the dense model and the narrow ones."""
    rows = ["| model | whole | HQQ 4 bits | increase | factor |", "|---|---|---|---|---|"]
    for whole, quantised in _pairs(study):
        a, b = whole.perplexity, quantised.perplexity
        rows.append(f"| {whole.model} | {a:.2f} | {b:.2f} | {b - a:+.2f} | x{b / a:.3f} |")
    return "\n".join(rows)


def _pairs(study: str) -> list[tuple[Point, Point]]:
    """Models whole and in four bits, where both were measured."""
    known = {(point.base, point.setting): point for point in points(study)}
    bases = sorted({base for base, _ in known}, key=_dense_first)
    pairs = [(known.get((base, "whole")), known.get((base, "b4-auto"))) for base in bases]
    return [(whole, four) for whole, four in pairs if whole is not None and four is not None]


def kv_table() -> str:
    """The paper's MPT-30B table."""
    found = _read("quantise-stories-mpt")
    found.sort(key=lambda entry: (entry["method"] or "", -(entry["bits"] or 16), entry["ratio"] or 0))
    dense = next(e["perplexity"]["perplexity"] for e in found if e["method"] is None and e["bits"] is None)
    rows = [
        "| method | attention removed | attention weights | KV cache | live KV bytes / token | perplexity |",
        "|---|---|---|---|---|---|",
    ]
    for entry in found:
        value, held, cache = entry["perplexity"]["perplexity"], entry["attention"], entry["cache"]
        rows.append(
            f"| {_kv_name(entry)} | {held['removed']:.1%} | {held['factor']:.2f}x | {cache['factor']:.2f}x "
            f"| {cache['bytes_per_token']:,.0f} | {value:.2f} ({value - dense:+.2f}) |"
        )
    return "\n".join(rows)


def _kv_name(entry: dict[str, Any]) -> str:
    pure = "dense" if entry["method"] is None else f"{entry['method']} @ {entry['ratio']:.0%}"
    if entry["bits"] is None:
        return pure
    return f"{entry['bits']}-bit HQQ" + ("" if entry["method"] is None else f" + {pure}")


def figure(study: str) -> bytes:
    """Bits per original weight against perplexity: pure HQQ as a line, narrow quantised models as points."""
    from trisect.compare.figures import MARKERS
    from trisect.support.plots import as_svg, one_plot

    found = [point for point in points(study) if point.setting != "whole" and point.bits < LINE_ENDS]
    line = pure_line(found)
    canvas, axes = one_plot()
    axes.plot([p.bits for p in line], [p.perplexity for p in line], color="0.5", label="pure HQQ")
    for at, base in enumerate(sorted({point.base for point in found}, key=_dense_first)):
        these = [point for point in found if point.base == base]
        label = "pure HQQ, each setting" if base == "dense" else f"{these[0].model} + HQQ"
        colour = "0.5" if base == "dense" else f"C{at}"
        x, y = [p.bits for p in these], [p.perplexity for p in these]
        axes.plot(x, y, marker=MARKERS[at], linestyle="", color=colour, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("bits per weight of the dense decoder")
    axes.set_ylabel("perplexity")
    axes.set_title(STUDIES[study])
    axes.legend(frameon=False)
    return as_svg(canvas)


def _dense_first(base: str) -> tuple[bool, str]:
    return base != "dense", base


def _read(folder: str) -> list[dict[str, Any]]:
    return list(tables.read_all(f"{folder}/*.json").values())


TABLES = {
    **{f"quantise-orthogonal-{study}": partial(orthogonal_table, study) for study in STUDIES},
    **{f"quantise-pareto-{study}": partial(pareto_table, study) for study in STUDIES},
    "quantise-kv": kv_table,
}


def filled(text: str) -> str:
    """The document with its tables made anew."""
    return tables.filled(text, TABLES)


if __name__ == "__main__":
    from results_page import main

    main()
