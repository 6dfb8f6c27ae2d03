"""Speed of narrow models: rows of `trisect bench`, of short prompts, and of the rotary kernel."""

from typing import Any

from tables import Entry, found, read, read_all, table, targets

from trisect.bench.figures import draw
from trisect.bench.rows import MEMORY, PHASES, SPEED, cells, failures, markdown, notes_for, related

BENCHES = {
    "bench-cpu-smollm2": ("SmolLM2-135M on a CPU", "python benchmarks/cpu_smollm2.py"),
    "bench-h200": ("One GPU", "python benchmarks/h200.py --out experiments/results/bench-h200"),
}
"""Folder of results -> its title and its command."""
GAIN = "gain"
BESIDE_EACH_OTHER = (
    "Models are measured one after the other here. Where a prompt is so short that the host's launches take "
    "the time, the host's own pace decides, and it drifts; docs/bench.md names the script that takes turns."
)
SHORT_PROMPTS = "short-prompts.json"


def rows_of(bench: str) -> list[Entry]:
    """With what each row is beside the dense one."""
    return [dict(row) for row in related(read(f"{bench}/rows.json")["rows"])]


def receipts_of(bench: str) -> list[Entry]:
    return list(read(f"{bench}/rows.json")["receipts"]) if found(f"{bench}/rows.json") else []


def bench_tables(bench: str) -> str:
    """Speed and memory of both phases."""
    rows, pieces = rows_of(bench), []
    for phase in PHASES:
        for name, columns in (("speed", SPEED), ("memory", MEMORY)):
            header, lines = cells(rows, phase, columns)
            if lines:
                pieces.append(f"{phase.capitalize()}, {name}:\n\n{markdown(header, lines).strip()}")
    return "\n\n".join(pieces)


def asked_rows(bench: str) -> list[Entry]:
    """Narrow models in the setting that something was asked of: whole models, not compiled; all on a CPU."""
    setting = {} if "cpu" in bench else targets()["speed_setting"]
    return [
        row
        for row in rows_of(bench)
        if row["case"]["kind"] == "trisect"
        and row.get("against_dense")
        and not row.get("extrapolated")
        and row["case"]["mode"] != "compile"
        and all(row["case"][name] == value for name, value in setting.items())
    ]


def bench_short(bench: str) -> list[str]:
    """Notes, what failed, and where narrow models stand beside their limit."""
    rows = rows_of(bench)
    lines = [str(note) for note in notes_for(rows)]
    for phase in PHASES:
        chosen = [row for row in asked_rows(bench) if row["case"]["phase"] == phase]
        if chosen:
            lines.append(_share(bench, phase, chosen))
    beaten = _beaten(rows)
    lines += [*beaten, BESIDE_EACH_OTHER] if beaten else []
    failed = len(failures(rows))
    return [*lines, f"Rows that failed: {failed}."] if failed else lines


def _share(bench: str, phase: str, rows: list[Entry]) -> str:
    """How far narrow models come of what was taken away, beside the stock model and beside our dense one."""
    least, asked = min(row["against_dense"]["share_of_limit"] for row in rows), targets()
    wanted = asked[f"{phase}_share_of_limit"]
    line = f"{phase.capitalize()}: narrow models are at {least:.3f} of their limit or more"
    if "cpu" in bench:
        return f"{line} (asked on a GPU: {wanted:g})."
    setting = f"{asked['speed_setting']['subject']}, {asked['speed_setting']['attention']}"
    line += f" ({setting}; asked: {wanted:g}, {'met' if least >= wanted else '**missed**'})"
    shares = [row["against_owned"]["share_of_limit"] for row in rows if row.get("against_owned")]
    if not shares:
        return f"{line}."
    return (
        f"{line}. That is beside the stock dense model, which does not have our runtime; beside the dense "
        f"model in it they are at {min(shares):.3f} or more."
    )


def _beaten(rows: list[Entry]) -> list[str]:
    """Where a narrow model is slower than a dense or a factored one, or our runtime than the stock one."""
    lines = []
    by_setting: dict[tuple[Any, ...], dict[tuple[str, str], Entry]] = {}
    for row in rows:
        case = row["case"]
        setting = tuple(case[key] for key in ("subject", "phase", "batch", "length", "attention", "mode"))
        if "error" not in row and not case["folded"]:
            by_setting.setdefault(setting, {})[case["kind"], case["asked"]] = row
    for (subject, phase, batch, length, *kernels), found_rows in by_setting.items():
        for (kind, asked), row in found_rows.items():
            dense = "dense", ""
            for other in {"trisect": (("svd-llm", asked), dense), "owned": (dense,)}.get(kind, ()):
                rival = found_rows.get(other)
                if rival is not None and rival["times"]["p50"] < row["times"]["p50"]:
                    slower = row["times"]["p50"] / rival["times"]["p50"]
                    place = f"{subject}, {phase} {batch} x {length} ({', '.join(kernels)})"
                    name = f"{kind} {asked}".rstrip()
                    lines.append(f"{place}: {name} takes {slower:.2f} times as long as {other[0]}.")
    return lines


def pictures(bench: str) -> dict[str, bytes]:
    """Gains over the dense model with their limits."""
    made = draw(rows_of(bench))
    return {f"{bench}-{name}": svg for name, svg in made.items() if name.startswith(GAIN)}


def short_prompts_table() -> str:
    """Until everything is done, until the host has launched it, and both ways to compare."""
    header = ["prompt", "model", "p50 ms", "p50 ms until launched", "p50 / dense", "lap by lap / dense"]
    header.append("p10 to p90 of laps")
    lines = [
        [_prompt(row), _model(row), f"{1000 * row['seconds']:.2f}", f"{1000 * row['launched_seconds']:.2f}"]
        + [f"{row['against_dense']:.3f}", f"{row['paired']:.3f}"]
        + [f"{row['paired_p10']:.3f} to {row['paired_p90']:.3f}"]
        for row in read(SHORT_PROMPTS)["rows"]
    ]
    return table(header, lines)


def short_prompts_short() -> list[str]:
    """Where a narrow model, or our runtime, is slower than the stock model in the same laps."""
    return [
        f"{row['name']}, {_prompt(row)}: {_model(row)} takes {row['paired']:.3f} times as long as dense."
        for row in read(SHORT_PROMPTS)["rows"]
        if row["paired"] > 1
    ]


def _prompt(row: Entry) -> str:
    return f"{row['batch']} x {row['length']}"


def _model(row: Entry) -> str:
    return f"{row['kind']} {row['asked']}".rstrip()


def rotary_files() -> dict[str, Any]:
    """What benchmarks/rotary.py wrote, wherever it was put below the results."""
    files = {**read_all("rotary*.json"), **read_all("bench-*/rotary*.json")}
    return {name: file for name, file in files.items() if "copy_bytes_per_second" in file}


def rotary_table() -> str:
    header = ["size", "way", "microseconds", "GB/s", "share of the copy bandwidth"]
    lines = [
        [row["name"], row["way"], f"{1e6 * row['seconds']:.1f}", f"{row['bytes_per_second'] / 1e9:,.0f}"]
        + [f"{row['share_of_copy']:.2f}"]
        for file in rotary_files().values()
        for row in file["rows"]
    ]
    asked = targets()["rotary_share_of_copy"]
    return (
        table(header, lines)
        + f"\n\nAsked of the kernel at prefill size: at least {asked:g} of the copy bandwidth."
    )
