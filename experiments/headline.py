"""What the README says of machines: as little as a newcomer needs."""

import speed_tables as speed
from tables import found, read

GPU = "bench-h200"


def machine_lines() -> str:
    """Speed of the narrow model, and memory that compressing takes, wherever they were measured."""
    lines = [f"- {line}" for bench in speed.BENCHES for line in _gains(bench)]
    if found(f"{GPU}/rows.json") and any(
        row["against_dense"]["share_of_limit"] > 1 for row in speed.asked_rows(GPU)
    ):
        lines.append(
            "- Limits count what was taken away. Gains on the GPU pass theirs because our runtime also fuses "
            "what the stock dense model runs as several kernels; docs/results.md has the two apart."
        )
    if found("stream-cpu.json"):
        file = read("stream-cpu.json")
        lines.append(
            f"- Compressing a checkpoint of {file['model_bytes'] / 1e9:.2f} GB layer by layer took "
            f"{file['streamed']['peak_bytes'] / 1e9:.2f} GB of memory at its peak, "
            f"{file['in_memory']['peak_bytes'] / 1e9:.2f} GB without `--stream`."
        )
    return "\n".join(lines)


def _gains(bench: str) -> list[str]:
    """One line per model and ratio: each phase against the dense model, and its limit."""
    told: dict[str, list[str]] = {}
    if not found(f"{bench}/rows.json"):
        return []
    for row in speed.asked_rows(bench):
        case = row["case"]
        if "/" not in case["asked"]:  # widths by name are for who compares them
            size = f"{case['batch']} x {case['length']}" + (f" + {case['new']}" if case["new"] else "")
            gain, limit = row["against_dense"]["speedup"], row["against_dense"]["limit"]
            name = f"{case['subject']}, {row['removed']:.0%} removed, {case['device']}"
            told.setdefault(name, []).append(
                f"{case['phase']} ({size}) {gain:.2f}x as fast as dense, limit {limit:.2f}x"
            )
    return [f"{name}: {'; '.join(gains)}." for name, gains in told.items()]
