"""What compressing takes: memory, processes, kills, hostile files, true shapes, growth."""

from figures import Plot
from tables import Entry, read, rows_of, sourced, table

SIZES = ("layers", "d_model", "MLP width", "experts", "tokens")
PROFILED = ("passes", "sampled scores", "sums", "directions of F-8", "solvers", "rest")
STAGES = ("read", "forward", "grams", "qk", "ov", "mlp", "write", "share", "plan", "other")


def stream() -> str:
    """Peak memory and seconds, layer by layer and all at once."""
    file = read("stream-cpu.json")
    lines = [
        [name, f"{file[key]['peak_bytes'] / 1e9:.2f} GB", f"{file[key]['seconds']:.0f}"]
        for name, key in (("streamed", "streamed"), ("in memory", "in_memory"))
    ]
    said = (
        f"Checkpoint on disk: {file['model_bytes'] / 1e9:.2f} GB, random weights. "
        f"Tensors that differ between the two results: {file['tensors_that_differ']}."
    )
    made = table(["", "peak memory", "seconds"], lines)
    return sourced(f"{made}\n\n{said}", [file], "python experiments/stream_cpu.py")


def ranks() -> str:
    """Seconds by number of processes, and how far the models are apart."""
    file = read("ranks.json")
    lines = []
    for method, entry in file["methods"].items():
        first = entry["one_node"][0]["seconds"]["compress"]
        for row in entry["one_node"]:
            seconds = row["seconds"]
            stages = [f"{seconds[stage]:.1f}" if stage in seconds else "" for stage in STAGES]
            apart = f"{row['largest_logit_difference']:.1e} of {row['largest_logit']:.1f}"
            total = f"{seconds['compress']:.1f} ({first / seconds['compress']:.2f}x)"
            lines.append([method, str(row["processes"]), total, *stages, apart])
    made = table(["method", "processes", "seconds", *STAGES, "largest logit difference"], lines)
    return sourced(made, [file], "python experiments/ranks.py")


def kills() -> str:
    """Runs that were killed, and their results."""
    file = read("kill-and-resume.json")
    layers = file["layers_finished_when_killed"]
    line = [str(file["kills"]), str(file["byte_identical"]), f"{min(layers)} to {max(layers)}"]
    made = table(["kills", "results with the same bytes", "layers finished when killed"], [line])
    return sourced(made, [file], "python experiments/kill_and_resume.py")


def fuzz() -> str:
    """Damaged files by kind: accepted, refused, and anything else."""
    file = read("fuzz.json")
    outcomes = list(file["outcomes"])
    lines = [[kind, *(f"{counts.get(o, 0):,}" for o in outcomes)] for kind, counts in file["kinds"].items()]
    lines.append(["all", *(f"{file['outcomes'][outcome]:,}" for outcome in outcomes)])
    said = f"Crashes, hangs and files in wrong places: {len(file['findings'])}."
    made = table(["kind of file", *outcomes], lines)
    return sourced(f"{made}\n\n{said}", [file], "python experiments/fuzz.py")


def shapes() -> str:
    """Seconds and peak memory of compressing models of true shapes."""
    rows = rows_of("scale-shapes.json")
    header = ["shape, method", "layers run", "seconds", "per layer", "whole model", "peak on the device"]
    lines = [
        [
            _case(row),
            str(row["layers"]),
            f"{row['seconds']:.1f}",
            f"{row['seconds_per_layer']:.2f}",
            f"{row['whole_model_seconds']:.0f}",
            "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.1f} GB",
        ]
        for row in rows
    ]
    return sourced(table(header, lines), rows, "python experiments/scale_shapes.py --device cuda")


def stages() -> str:
    """Seconds of a layer that a3+, and its loss curves, spend on what."""
    rows = rows_of("profile-a3plus.json")
    lines = []
    for row in rows:
        sums = dict.fromkeys(PROFILED, 0.0)
        for path, seconds in row["stages"].items():
            sums[_profiled(path)] += seconds
        per_layer = [f"{seconds:.2f}" for seconds in (row["seconds_per_layer"], *sums.values())]
        lines.append([row["name"], f"{row['tokens']:,}", *per_layer, f"{row['peak_device_bytes'] / 1e9:.1f} GB"])
    made = table(["case", "tokens", "seconds per layer", *PROFILED, "peak on the device"], lines)
    return sourced(made, rows, "PYTHONPATH=src python3 benchmarks/profile_a3plus.py smollm2 8b 8b-curves")


def _profiled(path: str) -> str:
    """Which column a stage inside stages belongs to."""
    inner = path.rpartition(" > ")[2]
    if "linearised" in path:
        return "directions of F-8"
    if inner in ("scores", "forward"):
        return {"scores": "sampled scores", "forward": "passes"}[inner]
    if inner in ("regression", "keep rows", "grams", "means"):
        return "sums"
    return (
        "solvers"
        if path.split(" > ")[0].split()[0] in ("qk", "ov", "mlp", "refit-up", "refit-down", "solve")
        else "rest"
    )


def _case(row: Entry) -> str:
    return f"{row['shape']}, {row['method']}"


def growth() -> str:
    """Powers with which seconds, memory and moments grow, fitted with their standard errors, and counted."""
    rows = sorted(rows_of("cost-growth.json"), key=lambda row: SIZES.index(row["size"]))
    lines = []
    for row in rows:
        values = [f"{point['value']:,}" for point in row["rows"]]
        powers = [_power(row["exponents"][key]) for key in ("seconds", "memory", "moments")]
        lines.append([row["size"], row["method"], ", ".join(values), *powers])
    made = table(["size", "method", "at", "seconds grow with power", "peak memory", "moments"], lines)
    return sourced(made, rows, "python experiments/cost_growth.py")


def _power(found: Entry) -> str:
    power, error, counted = (round(found[key], 2) + 0.0 for key in ("power", "error", "counted"))
    return f"{power:.2f} ± {error:.2f} ({counted:.2f})"


def shapes_figure(plot: Plot) -> None:
    """Where the time goes at true shapes, for one layer."""
    rows = [
        (_case(row), {stage: s / row["layers"] for stage, s in row["receipt"]["timings"].items()})
        for row in rows_of("scale-shapes.json")
    ]
    plot.stacked(rows, STAGES)
    plot.label("", "seconds per layer", "", legend=False)
    plot.axes.legend(frameon=False, fontsize=7, ncols=5, loc="lower center", bbox_to_anchor=(0.4, 1.0))


TABLES = {
    "stream": stream,
    "ranks": ranks,
    "kills": kills,
    "fuzz": fuzz,
    "shapes": shapes,
    "growth": growth,
    "stages": stages,
}
FIGURES = {"scale-shapes": shapes_figure}
