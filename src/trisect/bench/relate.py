"""Rows against their dense row: speed-up, the limit of it, memory saved, and what had to be saved."""

from collections.abc import Mapping, Sequence
from typing import Any

from trisect.bench.rows import Case

Row = Mapping[str, Any]


def related(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every row, and what it is beside the dense rows of the same setting.

    `against_dense` is the stock model, `against_owned` the dense one in our runtime: the difference between
    both is what the runtime does, not the compression.
    """
    stock, owned = (_rows_of(rows, kind) for kind in ("dense", "owned"))
    found = []
    for row in rows:
        new = dict(row)
        if "error" not in row:
            setting = Case(**row["case"]).baseline()
            new["share_of_peak"] = row["floor_seconds"] / row["times"]["p50"]
            for name, baselines in (("against_dense", stock), ("against_owned", owned)):
                if setting in baselines:
                    new[name] = against(row, baselines[setting])
        found.append(new)
    return found


def against(row: Row, dense: Row) -> dict[str, Any]:
    """A row beside its dense one.

    The limit of a prefill is the ratio of FLOPs, that of decoding the ratio of bytes: what a device that does
    nothing else could gain.
    """
    prefill = row["case"]["phase"] == "prefill"
    work = [r["flops"]["total"] if prefill else r["bytes"] for r in (dense, row)]
    speedup = dense["times"]["p50"] / row["times"]["p50"]
    limit = work[0] / work[1]
    removed = sum(dense[name] - row[name] for name in ("parameter_bytes", "cache_bytes"))
    peaks = dense["peak_memory"], row["peak_memory"]
    return {
        "speedup": speedup,
        "limit": limit,
        "share_of_limit": speedup / limit,
        "flops": row["flops"]["layers"] / dense["flops"]["layers"],
        "peak_memory": None if None in peaks else peaks[1] / peaks[0],
        "peak_saved": None if None in peaks else peaks[0] - peaks[1],
        "removed_bytes": removed,
    }


def failures(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "error" in row]


def _rows_of(rows: Sequence[Row], kind: str) -> dict[tuple[Any, ...], Row]:
    """Setting -> the row of that kind that did not fail."""
    return {
        Case(**row["case"]).baseline(): row
        for row in rows
        if row["case"]["kind"] == kind and "error" not in row
    }
