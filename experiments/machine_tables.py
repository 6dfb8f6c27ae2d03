"""What compressing takes: memory, processes, kills, hostile input, true shapes, growth."""

from typing import Any

from tables import Entry, found, read, read_all, table, targets, verdict

STAGES = ("read", "forward", "grams", "qk", "ov", "mlp", "write", "share", "plan", "other")
GROWTH = "cost-growth/growth.json"


def stream_table() -> str:
    """Peak memory and seconds, layer by layer and all at once."""
    file = read("stream-cpu.json")
    rows = [
        [name, f"{file[key]['peak_bytes'] / 1e9:.2f} GB", f"{file[key]['seconds']:.0f}"]
        for name, key in (("streamed", "streamed"), ("in memory", "in_memory"))
    ]
    sizes = file["receipt"]["recipe"]["sizes"]
    told = (
        f"Checkpoint on disk: {file['model_bytes'] / 1e9:.2f} GB, {sizes['num_hidden_layers']} layers. "
        f"Tensors that differ between the two results: {file['tensors_that_differ']}."
    )
    return table(["", "peak memory", "seconds"], rows) + "\n\n" + told


def stream_short() -> list[str]:
    file, limit = read("stream-cpu.json"), targets()["stream_peak_bytes"]
    peak, took = file["streamed"]["peak_bytes"], file["streamed"]["seconds"] / file["in_memory"]["seconds"]
    return [
        "Peak memory: "
        + verdict(peak, limit, shown=f"{peak / 1e9:.2f} GB", asked=f"{limit / 1e9:g} GB")
        + f". Streaming took {took:.2f} times as long.",
        "The weights are random: this is about memory.",
    ]


def ranks_table() -> str:
    """Seconds by number of processes, and how far the models are apart."""
    rows = []
    for method, entry in read("ranks.json")["methods"].items():
        first = entry["one_node"][0]["seconds"]["compress"]
        for row in entry["one_node"]:
            seconds = row["seconds"]
            stages = [f"{seconds[stage]:.1f}" if stage in seconds else "" for stage in STAGES]
            apart = f"{row['largest_logit_difference']:.1e} of {row['largest_logit']:.1f}"
            total = f"{seconds['compress']:.1f} ({first / seconds['compress']:.2f}x)"
            rows.append([method, str(row["processes"]), total, *stages, apart])
    return table(["method", "processes", "seconds", *STAGES, "largest logit difference"], rows)


def ranks_short() -> list[str]:
    file = read("ranks.json")
    same = {m: e["two_nodes_give_the_bytes_of_two_processes"] for m, e in file["methods"].items()}
    lines = [
        f"{method}: two network addresses {'gave' if equal else 'did **not** give'} the bytes of two "
        "processes on one."
        for method, equal in same.items()
    ]
    cores = file["receipt"]["recipe"]["cores"]
    most = max(row["processes"] for entry in file["methods"].values() for row in entry["one_node"])
    if most > cores:
        lines.append(f"The machine has {cores} cores: more processes than that could not help here.")
    lines.append("Two addresses of one machine, not two machines; gloo, not nccl.")
    return lines


def kills_table() -> str:
    file = read("kill-and-resume.json")
    layers = file["layers_finished_when_killed"]
    rows = [[str(file["kills"]), str(file["byte_identical"]), f"{min(layers)} to {max(layers)}"]]
    return table(["kills", "results with the same bytes", "layers finished when killed"], rows)


def fuzz_table() -> str:
    file = read("fuzz.json")
    outcomes = list(file["outcomes"])
    rows = [
        [kind, *(f"{counts.get(outcome, 0):,}" for outcome in outcomes)]
        for kind, counts in file["kinds"].items()
    ]
    rows.append(["all", *(f"{file['outcomes'][outcome]:,}" for outcome in outcomes)])
    return table(["kind of file", *outcomes], rows)


def fuzz_short() -> list[str]:
    file = read("fuzz.json")
    bad = len(file["findings"])
    return [
        f"Inputs: {file['recipe']['inputs']:,} (asked: {targets()['fuzz_inputs']:,}). "
        f"Crashes, hangs and files in wrong places: {bad}."
    ]


def shapes() -> list[Entry]:
    """Receipts of experiments/scale_shapes.py."""
    return [entry for entry in read_all("scale-*.json").values() if "seconds_per_layer" in entry]


def shapes_table() -> str:
    header = ["case", "layers run", "seconds", "a layer", "whole model", "peak on the device", "asked"]
    rows = [
        [
            f"{entry['shape']}, {entry['method']}",
            str(entry["layers"]),
            f"{entry['seconds']:.1f}",
            f"{entry['seconds_per_layer']:.2f}",
            f"{entry['whole_model_seconds']:.0f}",
            "" if entry["peak_bytes"] is None else f"{entry['peak_bytes'] / 1e9:.1f} GB",
            _asked(entry),
        ]
        for entry in shapes()
    ]
    stages = [stage for stage in STAGES if any(stage in e["receipt"]["timings"] for e in shapes())]
    seconds = [
        [f"{e['shape']}, {e['method']}", *(f"{e['receipt']['timings'].get(s, 0):.1f}" for s in stages)]
        for e in shapes()
    ]
    return table(header, rows) + "\n\nSeconds by stage:\n\n" + table(["case", *stages], seconds)


def _asked(entry: Entry) -> str:
    asked = targets()
    limits = [
        (entry["seconds"], asked["scale_seconds"].get(entry["case"]), "s"),
        (entry["seconds_per_layer"], asked["scale_seconds_per_layer"].get(entry["case"]), "s a layer"),
    ]
    told = [f"{limit} {unit}, {_met(value, limit)}" for value, limit, unit in limits if limit is not None]
    if entry["case"].startswith("70b") and entry["peak_bytes"] is not None:
        most = asked["scale_peak_bytes"]
        told.append(f"{most / 1e9:g} GB, {_met(entry['peak_bytes'], most)}")
    return "; ".join(told)


def _met(value: float, limit: float) -> str:
    return "met" if value <= limit else "**missed**"


def growth_entries() -> list[Entry]:
    """Receipts of experiments/cost_growth.py."""
    if not found(GROWTH):
        return []
    return [entry for methods in read(GROWTH)["growth"].values() for entry in methods.values()]


MEASURED = {
    "cpu": "Measured on a CPU: seconds of the process, and what its memory rose by.",
    "cuda": "Measured on a GPU: seconds on the wall, and the device's peak memory.",
}


def growth_table() -> str:
    """Powers with which seconds and memory grow, fitted and expected."""
    file = read(GROWTH)
    rows = []
    for size, methods in file["growth"].items():
        for method, entry in methods.items():
            expected = file["expected"][method][size]
            values = [row["value"] for row in entry["rows"]]
            fitted = entry["exponents"]
            cells = [_power(fitted.get(key), expected[key]) for key in ("seconds", "memory")]
            rows.append([size, method, f"{values[0]:,} to {values[-1]:,}", *cells])
    made = table(["size", "method", "from, to", "seconds grow with power", "peak memory"], rows)
    return f"{made}\n\n{MEASURED[file['device'].partition(':')[0]]}"


def _power(value: float | None, expected: float) -> str:
    return "" if value is None else f"{value:.2f} (expected: at most {expected:g})"


def time_rows() -> list[tuple[str, dict[str, Any]]]:
    """Name -> seconds by stage, for the figure: processes on a CPU."""
    return [
        (f"{method}, {row['processes']}", row["seconds"])
        for method, entry in read("ranks.json")["methods"].items()
        for row in entry["one_node"]
    ]
