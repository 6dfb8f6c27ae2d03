"""Rows of measurements: one file that is written after every row, comparisons with dense rows, tables and figures."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.support.files import write_json
from trisect.support.plots import Bar, Groups, drawn

FORMAT = 1
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
    length: int
    """Tokens of the prompt."""
    new: int
    """Tokens decoded; 0 for prefill."""
    layers: int
    """Layers that ran."""
    of_layers: int
    """Layers of the whole model."""
    dtype: str
    device: str

    def setting(self) -> tuple[Any, ...]:
        """What this case has in common with the dense row it is compared with."""
        own = ("kind", "asked", "widths", "folded")
        return tuple(value for name, value in asdict(self).items() if name not in own)

    def describe(self) -> str:
        """One line for progress and errors."""
        model = " ".join(filter(None, (self.subject, self.kind, self.asked)))
        size = f"{self.batch} x {self.length}" + (f"+{self.new}" if self.new else "")
        return f"{model}, {self.phase} {size}, {self.attention}, {self.mode}"


@dataclass(kw_only=True)
class Rows:
    """The rows of one file, or of memory alone."""

    path: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    receipts: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path | None) -> "Rows":
        """The rows of a file; none if it does not exist yet."""
        if path is None or not path.exists():
            return cls(path=path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}, this version reads {FORMAT}")
            page(data["rows"])  # reads every field that is ever read
            return cls(path=path, rows=list(data["rows"]), receipts=list(data["receipts"]))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise TrisectError(
                f"{path} does not hold rows of `trisect bench`: {error!r}; name another folder with -o."
            ) from error

    def done(self, case: Case, *, keep_errors: bool = False) -> bool:
        """Whether a case has a row, and one without an error unless those count."""
        wanted = asdict(case)
        return any(r["case"] == wanted and (keep_errors or "error" not in r) for r in self.rows)

    def add(self, case: Case, measured: Row) -> dict[str, Any]:
        """Put a row in, in place of an earlier one of the same case, and write the file."""
        row = {"case": asdict(case), **measured, "receipt": len(self.receipts) - 1}
        self.rows = [old for old in self.rows if old["case"] != row["case"]] + [row]
        if self.path is not None:
            write_json(self.path, self.to_dict())
        return row

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "receipts": self.receipts, "rows": self.rows}


def to_csv(rows: Iterable[Row]) -> str:
    """One line per row, nested values in columns of their own (`times.p50`)."""
    flat = [_flat(row) for row in rows]
    out = io.StringIO()
    columns = list(dict.fromkeys(name for row in flat for name in row))
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flat(value: Row, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, entry in value.items():
        if isinstance(entry, Mapping):
            found |= _flat(entry, "" if name == "case" else f"{prefix}{name}.")
        else:
            found[prefix + name] = entry
    return found


def failures(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "error" in row]


def related(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every row, with what it is beside the dense rows of the same setting.

    `against_dense` is the stock model, `against_owned` the dense one in our runtime: the difference between
    both is what the runtime does, not the compression.
    """
    measured = [row for row in rows if "error" not in row]
    baselines = {
        (row["case"]["kind"], Case(**row["case"]).setting()): row
        for row in measured
        if row["case"]["kind"] in ("dense", "owned")
    }
    found = []
    for row in rows:
        new, setting = dict(row), Case(**row["case"]).setting()
        if "error" not in row:
            new["share_of_peak"] = row["floor_seconds"] / row["times"]["p50"]
            for kind in ("dense", "owned"):
                if (kind, setting) in baselines:
                    new[f"against_{kind}"] = against(row, baselines[kind, setting])
        found.append(new)
    return found


def against(row: Row, dense: Row) -> dict[str, Any]:
    """Speed-up, memory saved and FLOPs of a row, relative to its dense one.

    The limit is the speed-up that the removed work allows: the ratio of FLOPs for a prefill, of bytes for
    decoding.
    """
    prefill = row["case"]["phase"] == "prefill"
    before, after = (r["flops"]["total"] if prefill else r["bytes"] for r in (dense, row))
    speedup, limit = dense["times"]["p50"] / row["times"]["p50"], before / after
    peaks = dense["peak_memory"], row["peak_memory"]
    return {
        "speedup": speedup,
        "limit": limit,
        "share_of_limit": speedup / limit,
        "flops": row["flops"]["layers"] / dense["flops"]["layers"],
        "peak_memory": None if None in peaks else peaks[1] / peaks[0],
        "peak_saved": None if None in peaks else peaks[0] - peaks[1],
        "removed_bytes": sum(dense[name] - row[name] for name in ("parameter_bytes", "cache_bytes")),
    }


GIGA = 1e9
BEYOND = 1.2
"""Share of the device's peak above which a row cannot be true; peaks themselves are measured, too."""

Columns = Mapping[str, Callable[[Row], str]]


def _against(name: str, form: str, *, baseline: str = "against_dense", scale: float = 1.0) -> Any:
    """A column of one comparison, empty for dense rows and where nothing is known."""

    def column(row: Row) -> str:
        value = row.get(baseline, {}).get(name)
        return "" if value is None or row["case"]["kind"] == "dense" else form.format(value / scale)

    return column


NAMES: Columns = {
    "shape": lambda row: row["case"]["subject"],
    "model": lambda row: _model(row["case"]),
    "widths": lambda row: row["case"]["widths"] + (" folded" if row["case"]["folded"] else ""),
    "run": lambda row: f"{_size(row['case'])} {_kernels(row['case'])}",
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


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows) + "\n"


def page(rows: Sequence[Row], *, notes: Sequence[str] = ()) -> str:
    """All tables as one Markdown page, failures at the end."""
    pieces = [f"- {note}" for note in notes]
    for phase in PHASES:
        for name, columns in TABLES.items():
            header, lines = cells(rows, phase, columns)
            if lines:
                pieces.append(f"\n## {phase.capitalize()}, {name}\n\n{markdown(header, lines)}")
    failed = [f"- {_model(r['case'])}, {_size(r['case'])}: {r['error']}" for r in failures(rows)]
    if failed:
        pieces.append("\n## Failed\n\n" + "\n".join(line.replace("\n", " ") for line in failed))
    return "\n".join(pieces) + "\n"


def notes_for(rows: Sequence[Row]) -> list[str]:
    """What the numbers mean, and which of them mean nothing here."""
    notes = ["Weights are random: right for speed, wrong for accuracy."]
    if any(row.get("extrapolated") for row in rows):
        notes.append(
            "Rows marked * ran some of the layers; times, memory and tokens/s are extrapolated to all of "
            "them from that slice and from one layer."
        )
    beyond = [r for r in rows if "error" not in r and r["floor_seconds"] > BEYOND * r["times"]["p50"]]
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


def _model(case: Row) -> str:
    mark = "*" if case["layers"] < case["of_layers"] else ""
    return f"{case['kind']}{mark}" + (f" {case['asked']}" if case["asked"] else "")


def _size(case: Row) -> str:
    return f"{case['batch']} x {case['length']}" + (f" + {case['new']}" if case["new"] else "")


def _kernels(case: Row) -> str:
    return case["attention"] + ("" if case["mode"] == "plain" else f", {case['mode']}")


def draw(rows: Sequence[Row]) -> dict[str, bytes]:
    """File name -> SVG: for every model and phase its throughput, and its gains over the dense model."""
    figures = []
    good = [row for row in related(rows) if "error" not in row]
    for subject, phase in dict.fromkeys((row["case"]["subject"], row["case"]["phase"]) for row in good):
        chosen = [row for row in good if (row["case"]["subject"], row["case"]["phase"]) == (subject, phase)]
        gains = [row for row in chosen if row["case"]["asked"] and "against_dense" in row]
        speeds = _groups((row, row["tokens_per_second"], None) for row in chosen)
        title = f"{subject}, {phase}"
        figures.append(Groups(name=f"throughput {title}", title=title, y_label="tokens/s", groups=speeds))
        if gains:
            label = "speed-up over dense (dash: its limit)"
            beside = [(row, row["against_dense"]["speedup"], row["against_dense"]["limit"]) for row in gains]
            groups = _groups(beside)
            figures.append(Groups(name=f"gain {title}", title=title, y_label=label, groups=groups, guide=1.0))
    return drawn(figures)


def _groups(values: Iterable[tuple[Row, float, float | None]]) -> dict[str, list[Bar]]:
    """A group of bars per setting."""
    groups: dict[str, list[Bar]] = {}
    for row, value, limit in values:
        case = row["case"]
        note = f"{100 * row['removed']:.0f}%" if case["asked"] else "dense"
        bar = Bar(label=case["kind"], value=value, note=note, limit=limit)
        groups.setdefault(f"{_size(case)}\n{_kernels(case)}", []).append(bar)
    return groups
