"""Speed of narrow models: rows of `trisect bench`, of short prompts, and of the rotary kernel."""

from collections.abc import Sequence
from functools import partial

from figures import Plot
from tables import Entry, read, rows_of, sourced, table

COMMANDS = {
    "bench-cpu-smollm2": "python benchmarks/cpu_smollm2.py",
    "bench-h200": "python benchmarks/h200.py --out runs/bench-h200",
}
GPU, CPU = "bench-h200", "bench-cpu-smollm2"
SHAPE = "llama-2-13b"
GIGA = 1e9


def bench_rows(bench: str, **setting: object) -> list[Entry]:
    """Rows that did not fail, whose case has these values."""
    return [
        row
        for row in rows_of(f"{bench}.json")
        if "error" not in row and all(row["case"][name] == value for name, value in setting.items())
    ]


def summary_rows() -> list[Entry]:
    """LLaMA-2-13B on the GPU with fused attention: dense, and cut to a ratio by trisect and by SVD-LLM."""
    rows = bench_rows(GPU, subject=SHAPE, attention="sdpa", folded=False)
    return [row for row in rows if row["case"]["mode"] != "compile" and "/" not in row["case"]["asked"]]


def bench_table(bench: str) -> str:
    """Speed and memory of every row of a run."""
    rows = rows_of(f"{bench}.json")
    good = [row for row in rows if "error" not in row]
    pieces = []
    for subject in dict.fromkeys(row["case"]["subject"] for row in good):
        for phase in ("prefill", "decode"):
            chosen = [r for r in good if (r["case"]["subject"], r["case"]["phase"]) == (subject, phase)]
            if chosen:
                pieces.append(f"{subject}, {phase}:\n\n{_table(chosen)}")
    failed = len(rows) - len(good)
    if failed:
        pieces.append(f"Rows that failed: {failed}.")
    return sourced("\n\n".join(pieces), read(f"{bench}.json")["receipts"], COMMANDS[bench])


def speed() -> str:
    """What narrow and factored models gain on one GPU."""
    header = ["run", "model", "removed", "tokens/s", "speed-up", "limit", "over dense in our runtime", "peak GB"]
    cut = [row for row in summary_rows() if row["case"]["asked"]]
    lines = []
    for row in sorted(cut, key=lambda row: (row["case"]["new"], row["case"]["batch"], row["case"]["asked"])):
        model, _, run, removed, rate, _, gain, limit, over, _, _, peak = _line(row)
        lines.append([f"{row['case']['phase']} {run}", model, removed, rate, gain, limit, over, peak])
    return sourced(table(header, lines), read(f"{GPU}.json")["receipts"], COMMANDS[GPU])


def _table(rows: Sequence[Entry]) -> str:
    header = [
        "model",
        "widths",
        "run",
        "removed",
        "tokens/s",
        "p50 ms",
        "speed-up",
        "limit",
        "over dense in our runtime",
    ]
    return table([*header, "weights GB", "cache GB", "peak GB"], [_line(row) for row in rows])


def _line(row: Entry) -> list[str]:
    case = row["case"]
    dense = case["kind"] == "dense"
    stock, owned = row.get("against_dense"), row.get("against_owned")
    return [
        _model(row),
        case["widths"] + (" folded" if case["folded"] else ""),
        _run(case),
        f"{row['removed']:.1%}",
        f"{row['tokens_per_second']:,.0f}",
        f"{1000 * row['times']['p50']:.3g}",
        "" if dense or not stock else f"{stock['speedup']:.2f}x",
        "" if dense or not stock else f"{stock['limit']:.2f}x",
        "" if dense or not owned else f"{owned['speedup']:.2f}x",
        f"{row['parameter_bytes'] / GIGA:.2f}",
        f"{row['cache_bytes'] / GIGA:.2f}",
        "" if row["peak_memory"] is None else f"{row['peak_memory'] / GIGA:.2f}",
    ]


def _model(row: Entry) -> str:
    mark = "*" if row["extrapolated"] else ""
    return f"{row['case']['kind']}{mark} {row['case']['asked']}".rstrip()


def _run(case: Entry) -> str:
    size = f"{case['batch']} x {case['length']}" + (f" + {case['new']}" if case["new"] else "")
    return f"{size} {case['attention']}" + ("" if case["mode"] == "plain" else f", {case['mode']}")


def headline() -> str:
    """Speed and memory in three lines, for the README."""
    gpu = [row for row in summary_rows() if row["case"]["kind"] == "trisect" and row["case"]["asked"] == "0.4"]
    cpu = [row for row in bench_rows(CPU, kind="trisect")]
    lines = [f"- {_gain(rows)}" for rows in (gpu, cpu)]
    file = read("stream-cpu.json")
    lines.append(
        f"- Compressing a {file['model_bytes'] / GIGA:.1f} GB checkpoint layer by layer (`--stream on`) took "
        f"{file['streamed']['peak_bytes'] / GIGA:.1f} GB of memory; in memory it took "
        f"{file['in_memory']['peak_bytes'] / GIGA:.1f} GB."
    )
    return "\n".join(lines)


def _gain(rows: Sequence[Entry]) -> str:
    first = rows[0]
    gains = []
    for row in rows:
        size = _run(row["case"]).partition(" sdpa")[0]
        gains.append(f"{row['case']['phase']} ({size}) {row['against_dense']['speedup']:.2f}x")
    place = f"{first['case']['subject']}, {first['removed']:.0%} removed, {first['case']['device']}"
    return f"{place}: {', '.join(gains)} as fast as the dense model."


def short_prompts() -> str:
    """Prefills that take as long as the host takes to launch them, models in turn."""
    file = read("short-prompts.json")
    header = ["prompt", "model", "p50 ms", "p50 ms until launched", "median ratio to dense", "p10 to p90"]
    lines = [
        [
            f"{row['batch']} x {row['length']}",
            f"{row['kind']} {row['asked']}".rstrip(),
            f"{1000 * row['seconds']:.2f}",
            f"{1000 * row['launched_seconds']:.2f}",
            f"{row['paired']:.3f}",
            f"{row['paired_p10']:.3f} to {row['paired_p90']:.3f}",
        ]
        for row in file["rows"]
    ]
    command = "python benchmarks/short_prompts.py --device cuda --json experiments/results/short-prompts.json"
    return sourced(table(header, lines), [file], command)


def rotary() -> str:
    """The rotary kernel beside plain operations and a compiler."""
    file = read("rotary.json")
    header = ["size", "implementation", "microseconds", "GB/s", "share of the copy bandwidth"]
    lines = [
        [row["name"], row["way"], f"{1e6 * row['seconds']:.1f}", f"{row['bytes_per_second'] / GIGA:,.0f}"]
        + [f"{row['share_of_copy']:.2f}"]
        for row in file["rows"]
    ]
    command = "python benchmarks/rotary.py --device cuda --json experiments/results/rotary.json"
    return sourced(table(header, lines), [file], command)


def speed_figure(phase: str, plot: Plot) -> None:
    """Speed-up over the dense model, a dash at the limit that the removed work allows."""
    rows = [row for row in summary_rows() if row["case"]["phase"] == phase and row["case"]["asked"]]
    gains = {f"{_model(row)}, batch {row['case']['batch']}": row["against_dense"]["speedup"] for row in rows}
    plot.bars(gains, limits=[row["against_dense"]["limit"] for row in rows])
    plot.label(f"{SHAPE} on one H200, {phase}", "speed-up over dense (dash: limit)", "", legend=False)


TABLES = {
    "speed": speed,
    "headline-machines": headline,
    "short-prompts": short_prompts,
    "rotary": rotary,
    **{bench: partial(bench_table, bench) for bench in COMMANDS},
}
FIGURES = {f"speed-{phase}": partial(speed_figure, phase) for phase in ("prefill", "decode")}
