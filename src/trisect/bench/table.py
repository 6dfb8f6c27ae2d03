"""Tables of rows: one for every figure beside its limit, and the paper's runtime table."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from trisect.bench.relate import related

Row = Mapping[str, Any]
GIGA = 1e9
BEYOND = 1.2
"""Share of the device's peak above which a row cannot be true; peaks themselves are measured, too."""

Columns = Mapping[str, Callable[[Row], str]]

NAMES: Columns = {
    "shape": lambda row: row["case"]["subject"],
    "model": lambda row: _model(row["case"]),
    "widths": lambda row: row["case"]["widths"] + (" folded" if row["case"]["folded"] else ""),
    "run": lambda row: f"{_size(row['case'])} {_kernels(row['case'])}",
}
SPEED: Columns = {
    **NAMES,
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.1f}",
    "p50 / p90 / p99 ms": lambda row: " / ".join(
        f"{1000 * row['times'][name]:.3g}" for name in ("p50", "p90", "p99")
    ),
    "speed-up": lambda row: _against(row, "speedup", "{:.3f}x"),
    "limit": lambda row: _against(row, "limit", "{:.3f}x"),
    "of limit": lambda row: _against(row, "share_of_limit", "{:.3f}"),
    "over owned": lambda row: _against(row, "speedup", "{:.3f}x", baseline="against_owned"),
    "of peak": lambda row: f"{row['share_of_peak']:.3f}",
}
MEMORY: Columns = {
    **NAMES,
    "removed": lambda row: f"{100 * row['removed']:.1f}%",
    "weights GB": lambda row: f"{row['parameter_bytes'] / GIGA:.3f}",
    "cache GB": lambda row: f"{row['cache_bytes'] / GIGA:.3f}",
    "KV B/token": lambda row: f"{row['kv_bytes_per_token']:,}",
    "peak GB": lambda row: "" if row["peak_memory"] is None else f"{row['peak_memory'] / GIGA:.3f}",
    "peak saved GB": lambda row: _against(row, "peak_saved", "{:.3f}", scale=GIGA),
    "weights + cache removed GB": lambda row: _against(row, "removed_bytes", "{:.3f}", scale=GIGA),
}
TABLES = {"speed": SPEED, "memory": MEMORY}

RUNTIME: Columns = {
    "compression": lambda row: "original" if not row["case"]["asked"] else f"{100 * row['removed']:.1f}%",
    "model": lambda row: row["case"]["kind"],
    "qk/vo/mlp": NAMES["widths"],
    "attention": lambda row: _kernels(row["case"]),
    "FLOPs of one layer": lambda row: f"{row['flops']['layers'] / row['case']['of_layers']:.3g}",
    "tokens/s": SPEED["tokens/s"],
    "peak MB": lambda row: "" if row["peak_memory"] is None else f"{row['peak_memory'] / 1e6:,.0f}",
}
"""The paper's runtime table; FLOPs, speed and memory relative to the first row follow."""


def cells(rows: Sequence[Row], phase: str, columns: Columns) -> tuple[list[str], list[list[str]]]:
    """Header and cells of one phase's rows that did not fail, without columns that say nothing."""
    chosen = [row for row in related(rows) if row["case"]["phase"] == phase and "error" not in row]
    made = {name: [column(row) for row in chosen] for name, column in columns.items()}
    filled = {name: values for name, values in made.items() if any(values)}
    if len(set(filled.get("shape", ()))) == 1:
        del filled["shape"]
    return list(filled), [list(line) for line in zip(*filled.values(), strict=True)]


def runtime_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The paper's runtime table from the prefill rows of one batch and length, eager first."""
    chosen = [row for row in rows if row["case"]["phase"] == "prefill" and "error" not in row]
    chosen.sort(key=lambda row: (row["removed"], row["case"]["kind"], row["case"]["attention"]))
    header = [*RUNTIME, "FLOPs", "speed-up", "peak memory"]
    return header, [
        [*(column(row) for column in RUNTIME.values()), *_relative(row, chosen[0])] for row in chosen
    ]


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table for documents, and for terminals that have nothing better."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def report(rows: Sequence[Row], *, notes: Sequence[str] = ()) -> str:
    """Everything as one markdown page."""
    pieces = [f"- {note}" for note in notes]
    for phase in ("prefill", "decode"):
        for name, columns in TABLES.items():
            header, lines = cells(rows, phase, columns)
            if lines:
                pieces.append(f"\n## {phase.capitalize()}, {name}\n\n{markdown(header, lines)}")
    for name, group in settings(rows).items():
        header, lines = runtime_cells(group)
        pieces.append(f"\n## Runtime table, {name}\n\n{markdown(header, lines)}")
    failed = [
        f"- {_model(row['case'])}, {_size(row['case'])}: {row['error']}" for row in rows if "error" in row
    ]
    if failed:
        pieces.append("\n## Failed\n\n" + "\n".join(line.replace("\n", " ") for line in failed))
    return "\n".join(pieces) + "\n"


def settings(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Prefill rows by what the paper's table has one of: a model, a batch and a length."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        case = row["case"]
        if case["phase"] == "prefill" and "error" not in row:
            found.setdefault(f"{case['subject']}, {case['batch']} x {case['length']}", []).append(row)
    return found


def notes_for(rows: Sequence[Row]) -> list[str]:
    """What the numbers mean, and which of them mean nothing here."""
    notes = ["Weights are random: right for speed, wrong for accuracy."]
    if any(row.get("extrapolated") for row in rows):
        notes.append(
            "Rows marked * ran some of the layers; times, memory and tokens/s are extrapolated to all of "
            "them from that slice and from one layer."
        )
    beyond = [row for row in rows if "error" not in row and _of_peak(row) > BEYOND]
    if beyond:
        names = ", ".join(dict.fromkeys(f"{_model(row['case'])} ({row['case']['phase']})" for row in beyond))
        notes.append(
            f"Faster than this device can be, so noise: {names}. Measure again on a quiet machine, with more "
            "--layers if some were left out."
        )
    if any("threads" in row["case"]["device"] for row in rows):
        notes += [
            "On a CPU, compare rows of one run: speed-ups and their limits mean something, absolute times "
            "hold for this machine and its load only.",
            "On a CPU, peak memory is that of the whole process (libraries included), and there are no CUDA "
            "graphs and no tensor cores.",
        ]
    return notes


def _of_peak(row: Row) -> float:
    return float(row["floor_seconds"] / row["times"]["p50"])


def _relative(row: Row, first: Row) -> list[str]:
    peaks = row["peak_memory"], first["peak_memory"]
    return [
        f"{row['flops']['layers'] / first['flops']['layers']:.2f}x",
        f"{first['times']['p50'] / row['times']['p50']:.2f}x",
        "" if None in peaks else f"{peaks[0] / peaks[1]:.2f}x",
    ]


def _model(case: Mapping[str, Any]) -> str:
    mark = "*" if case["layers"] < case["of_layers"] else ""
    return f"{case['kind']}{mark}" + (f" {case['asked']}" if case["asked"] else "")


def _size(case: Mapping[str, Any]) -> str:
    return f"{case['batch']} x {case['length']}" + (f" + {case['new']}" if case["new"] else "")


def _kernels(case: Mapping[str, Any]) -> str:
    return case["attention"] + ("" if case["mode"] == "plain" else f", {case['mode']}")


def _against(row: Row, name: str, form: str, *, baseline: str = "against_dense", scale: float = 1.0) -> str:
    compared = row.get(baseline)
    if compared is None or compared[name] is None or row["case"]["kind"] == "dense":
        return ""
    return form.format(compared[name] / scale)
