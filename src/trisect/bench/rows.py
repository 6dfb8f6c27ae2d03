"""Rows of measurements: what each is about, comparisons with dense rows, and tables."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from trisect.records import parts, shapes

PHASES = ("prefill", "decode")
MODES = ("plain", "graphs", "compile")

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one row is about: rows with equal cases measure the same."""

    subject: str
    kind: str
    asked: str
    widths: str
    folded: bool
    phase: str
    attention: str
    mode: str
    batch: int
    length: int  # tokens of the prompt
    new: int  # tokens decoded; 0 for prefill
    layers: int  # layers that ran
    of_layers: int  # layers of the whole model
    dtype: str
    device: str

    @property
    def model(self) -> str:
        mark = "*" if self.layers < self.of_layers else ""
        return f"{self.kind}{mark}" + (f" {self.asked}" if self.asked else "")

    @property
    def size(self) -> str:
        return f"{self.batch} x {self.length}" + (f" + {self.new}" if self.new else "")

    @property
    def run(self) -> str:
        return f"{self.size} {self.attention}" + ("" if self.mode == "plain" else f", {self.mode}")

    def setting(self) -> tuple[Any, ...]:
        """What this case has in common with the dense row it is compared with."""
        own = ("kind", "asked", "widths", "folded")
        return tuple(value for name, value in asdict(self).items() if name not in own)

    def describe(self) -> str:
        """One line for progress and errors."""
        model = " ".join(filter(None, (self.subject, self.kind, self.asked)))
        return f"{model}, {self.phase} {self.size}, {self.attention}, {self.mode}"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One model to be timed."""

    kind: str
    asked: str  # what was asked for: a ratio, widths, or "checkpoint"; empty for dense models
    shape: shapes.ModelShape
    removed: float  # of the decoder's linear weights

    @property
    def widths(self) -> str:
        """E.g. "96/96/11008", with spans where layers differ; ranks for factored maps."""
        layers = self.shape.layers
        if any(layer.linears for layer in layers):
            return f"rank {span(linear.rank for layer in layers for linear in layer.linears)}"
        return "/".join(span(layer.width(part) for layer in layers) for part in parts.COMPONENTS)

    @property
    def folded(self) -> bool:
        """Whether heads turn at rates of their own."""
        return any(layer.folded for layer in self.shape.layers)


def span(widths: Iterable[int]) -> str:
    """E.g. "48", or "32..48" where they differ; "left whole" where there are none."""
    found = sorted(set(widths))
    if not found:
        return "left whole"
    return str(found[0]) if len(found) == 1 else f"{found[0]}..{found[-1]}"


def failures(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "error" in row]


def related(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every row, with what it is beside the dense rows of the same setting.

    `against_dense` is the stock model, `against_owned` the dense one in our runtime: the difference between
    both is what the runtime does, not the compression.
    """
    found, measured = [dict(row) for row in rows], [row for row in rows if "error" not in row]
    baselines = {(row["case"]["kind"], Case(**row["case"]).setting()): row for row in measured}
    for row in found:
        if "error" not in row:
            row["share_of_peak"] = row["floor_seconds"] / row["times"]["p50"]
            for kind in ("dense", "owned"):
                dense = baselines.get((kind, Case(**row["case"]).setting()))
                row |= {} if dense is None else {f"against_{kind}": against(row, dense)}
    return found


def against(row: Row, dense: Row) -> dict[str, Any]:
    """Speed-up, memory saved and FLOPs of a row, relative to its dense one."""
    # The limit is the speed-up that the removed work allows: the ratio of FLOPs for a prefill, of bytes for decoding.
    prefill = row["case"]["phase"] == "prefill"
    before, after = (r["flops"]["total"] if prefill else r["bytes"] for r in (dense, row))
    speedup, limit = dense["times"]["p50"] / row["times"]["p50"], before / after
    peaks = dense["peak_memory"], row["peak_memory"]
    return {
        "speedup": speedup,
        "noisy": uneven(row) or uneven(dense),
        "limit": limit,
        "share_of_limit": speedup / limit,
        "flops": row["flops"]["layers"] / dense["flops"]["layers"],
        "peak_memory": None if None in peaks else peaks[1] / peaks[0],
        "peak_saved": None if None in peaks else peaks[0] - peaks[1],
        "removed_bytes": sum(dense[name] - row[name] for name in ("parameter_bytes", "cache_bytes")),
    }


GIGA = 1e9
BEYOND = 1.2  # share of the device's peak above which a row cannot be true; peaks themselves are measured, too
CALLS = 0.5  # share of the memory's pace below which most of a decoding step is calls
UNEVEN = 1.5


def uneven(row: Row) -> bool:
    """Whether one lap in ten took much longer than the middle one."""
    return bool(row["times"]["p90"] > UNEVEN * row["times"]["p50"])


Columns = Mapping[str, Callable[[Row], str]]


def _against(name: str, form: str, *, baseline: str = "against_dense", scale: float = 1.0) -> Any:
    """A column of one comparison, empty for dense rows and where nothing is known."""

    def column(row: Row) -> str:
        found = row.get(baseline, {})
        value, mark = found.get(name), "~" if name == "speedup" and found.get("noisy") else ""
        return "" if value is None or row["case"]["kind"] == "dense" else mark + form.format(value / scale)

    return column


NAMES: Columns = {
    "shape": lambda row: row["case"]["subject"],
    "model": lambda row: Case(**row["case"]).model,
    "widths": lambda row: row["case"]["widths"] + (" folded" if row["case"]["folded"] else ""),
    "run": lambda row: Case(**row["case"]).run,
}
SPEED: Columns = {
    **NAMES,
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.1f}",
    "p50 / p90 / p99 ms": lambda row: " / ".join(f"{1000 * row['times'][name]:.3g}" for name in ("p50", "p90", "p99")),
    "speed-up": _against("speedup", "{:.3f}x"),
    "limit": _against("limit", "{:.3f}x"),
    "of limit": _against("share_of_limit", "{:.3f}"),
    "over owned": _against("speedup", "{:.3f}x", baseline="against_owned"),
    "of peak": lambda row: f"{row['share_of_peak']:.3f}",
    "FLOPs of one layer": lambda row: f"{row['flops']['layers'] / row['case']['of_layers']:.3g}",
}
MEMORY: Columns = {
    **NAMES,
    "removed": lambda row: f"{100 * row['removed']:.1f}%",
    "weights GB": lambda row: f"{row['parameter_bytes'] / GIGA:.3f}",
    "cache GB": lambda row: f"{row['cache_bytes'] / GIGA:.3f}",
    "KV B/token": lambda row: f"{row['kv_bytes_per_token']:,}",
    "peak GB": lambda row: "" if row["peak_memory"] is None else f"{row['peak_memory'] / GIGA:.3f}",
    "peak saved GB": _against("peak_saved", "{:.3f}", scale=GIGA),
    "weights + cache removed GB": _against("removed_bytes", "{:.3f}", scale=GIGA),
}
TABLES = {"speed": SPEED, "memory": MEMORY}


def cells(rows: Sequence[Row], phase: str, columns: Columns) -> tuple[list[str], list[list[str]]]:
    """Header and cells of one phase's rows that did not fail, without empty columns."""
    chosen = [row for row in related(rows) if row["case"]["phase"] == phase and "error" not in row]
    made = {name: [column(row) for row in chosen] for name, column in columns.items()}
    filled = {name: values for name, values in made.items() if any(values)}
    if len(set(filled.get("shape", ()))) == 1:
        del filled["shape"]
    return list(filled), [list(line) for line in zip(*filled.values(), strict=True)]


def tables(rows: Sequence[Row]) -> Iterator[tuple[str, tuple[list[str], list[list[str]]]]]:
    """Titles, headers and cells of all tables, by phase."""
    for phase, (name, columns) in product(PHASES, TABLES.items()):
        yield f"{phase}, {name}", cells(rows, phase, columns)


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows) + "\n"


def notes_for(rows: Sequence[Row]) -> list[str]:
    """What the numbers mean, and which of them mean nothing here."""
    what = "dense: the original in transformers; owned: the same in trisect's runtime, no gain of compression"
    notes = [f"{what}. Their weights are random, right for speed and wrong for accuracy."]
    if any(row.get("extrapolated") for row in rows):
        how = "times, memory and tokens/s are extrapolated to all of them from that slice and from one layer"
        notes.append(f"Rows marked * ran some of the layers; {how}.")

    def named(chosen: Callable[[Row], bool]) -> str:
        cases = [Case(**row["case"]) for row in rows if "error" not in row and chosen(row)]
        return ", ".join(dict.fromkeys(f"{case.model} ({case.phase})" for case in cases))

    if beyond := named(lambda row: row["floor_seconds"] > BEYOND * row["times"]["p50"]):
        notes.append(f"Faster than this device can be, so noise: {beyond}. Measure again on a quiet machine.")
    if noisy := named(uneven):
        notes.append(f"Noisy (~), one lap in ten took {UNEVEN} times the median or more: {noisy}.")
    steps = [row for row in rows if (row["case"]["phase"], row["case"]["kind"]) == ("decode", "dense")]
    paces = [row["floor_seconds"] / row["times"]["p50"] for row in steps if "error" not in row]
    if min(paces, default=1.0) < CALLS:
        what = "most of a step is calls, not weights, so that fewer weights save little; larger models show more"
        notes.append(f"The dense model decodes at {min(paces):.0%} of the memory's pace: {what}.")
    if any("threads" in row["case"]["device"] for row in rows):
        mean = "speed-ups and their limits mean something, absolute times hold for this machine and its load only"
        notes.append(f"On a CPU, compare rows of one run: {mean}.")
    return notes
