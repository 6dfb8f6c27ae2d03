"""Speed of narrow models: rows of `trisect bench`, of short prompts, and of the rotary kernel."""

from collections.abc import Callable, Sequence
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
    header = ["run", "model", "removed", "tokens/s", "over dense in our runtime", "limit", "of limit"]
    cut = [row for row in summary_rows() if row["case"]["asked"]]
    lines = []
    for row in sorted(cut, key=lambda row: (row["case"]["new"], row["case"]["batch"], row["case"]["asked"])):
        model, _, run, removed, rate, _, over, limit, share, stock, _, _, peak = _line(row)
        lines.append([f"{row['case']['phase']} {run}", model, removed, rate, over, limit, share, stock, peak])
    return sourced(table([*header, "over stock", "peak GB"], lines), read(f"{GPU}.json")["receipts"], COMMANDS[GPU])


def _table(rows: Sequence[Entry]) -> str:
    header = [
        "model",
        "widths",
        "run",
        "removed",
        "tokens/s",
        "p50 ms",
        "over dense in our runtime",
        "limit",
        "of limit",
        "over stock",
    ]
    return table([*header, "weights GB", "cache GB", "peak GB"], [_line(row) for row in rows])


def _line(row: Entry) -> list[str]:
    case = row["case"]
    stock, owned = ({} if case["kind"] == "dense" else row.get(f"against_{kind}") or {} for kind in ("dense", "owned"))
    limit = (owned or stock).get("limit")
    return [
        _model(row),
        case["widths"] + (" folded" if case["folded"] else ""),
        _run(case),
        f"{row['removed']:.1%}",
        f"{row['tokens_per_second']:,.0f}",
        f"{1000 * row['times']['p50']:.3g}",
        f"{owned['speedup']:.2f}x" if owned else "",
        f"{limit:.2f}x" if limit else "",
        f"{owned['share_of_limit']:.2f}" if owned else "",
        f"{stock['speedup']:.2f}x" if stock else "",
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


def profile_rows() -> dict[str, dict[str, Entry]]:
    """Decoding steps of one text kernel by kernel, by model and state."""
    file, found = read("decode-profile.json"), {}
    for name in sorted(set(file["before"]["rows"]) | set(file["after"]["rows"])):
        if name.endswith("batch 1"):
            model = name.removesuffix(" batch 1").replace(" owned", ", dense in our runtime").replace(" trisect", " at")
            found[model] = {s: file[s]["rows"][name] for s in ("before", "after") if name in file[s]["rows"]}
    return found


def decode_profile() -> str:
    """A step against the bytes that it must move, as the package has it and with layers of five launches."""
    file, lines = read("decode-profile.json"), []
    for model, states in profile_rows().items():
        cells = []
        for state in ("before", "after"):
            row = states.get(state)
            share = row and row["floor_micros"] / row["step_micros"]
            launches = row and sum(kernel["launches"] for kernel in row["kernels"].values())
            cells += [f"{row['step_micros']:,.0f}", f"{share:.2f}", f"{launches:.0f}"] if row else [""] * 3
        lines.append([model, f"{states['after']['floor_micros']:,.0f}", *cells])
    header = ["model", "byte limit us", "us", "of limit", "launches", "tried: us", "of limit", "launches"]
    command = "python benchmarks/decode_profile.py"
    return sourced(table(header, lines), [file["before"]["receipt"], file["after"]["receipt"]], command)


def profile_figure(plot: Plot) -> None:
    """Microseconds of a step by what its kernels do, beside what their bytes would take."""
    bandwidth = max(read("decode-profile.json")["after"]["ceilings"][name] for name in ("copy_bytes", "read_bytes"))
    stages = ["qkv", "o", "gate-up", "down", "head", "attention", "other kernels", "between kernels"]
    rows: list[tuple[str, dict[str, float]]] = []
    for model, states in profile_rows().items():
        if "before" in states:
            short = model.rpartition("-")[2].replace(", dense in our runtime", " dense")
            for state, row in states.items():
                rows.append(
                    (
                        f"{short}, tried" if state == "after" else short,
                        _by_stage(row, stages, lambda kernel: kernel["micros"]),
                    )
                )
            limit = _by_stage(states["after"], stages, lambda kernel: 1e6 * kernel["bytes"] / bandwidth)
            rows.append((f"{short}, bytes", limit | {"between kernels": 0.0}))
    plot.stacked(rows, stages)
    plot.label("One decoding step of one text, H200", "microseconds", "")


def _by_stage(row: Entry, stages: Sequence[str], size: Callable[[Entry], float]) -> dict[str, float]:
    found = {"between kernels": max(0.0, row["between_micros"])}
    for label, kernel in row["kernels"].items():
        stage = label if label in stages else "attention" if label == "rotate and write" else "other kernels"
        found[stage] = found.get(stage, 0.0) + size(kernel)
    return found


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
    "decode-profile": decode_profile,
    **{bench: partial(bench_table, bench) for bench in COMMANDS},
}
FIGURES = {f"speed-{phase}": partial(speed_figure, phase) for phase in ("prefill", "decode")}
FIGURES["decode-kernels"] = profile_figure
