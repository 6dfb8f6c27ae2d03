"""Tables say what the rows say."""

from typing import Any

import pytest

from trisect.bench.rows import MEMORY, SPEED, cells, markdown, notes_for, related

CASE = {
    "subject": "m", "kind": "dense", "asked": "", "widths": "128/128/13824", "folded": False,
    "phase": "prefill", "attention": "sdpa", "mode": "plain", "batch": 2, "length": 2048, "new": 0,
    "layers": 40, "of_layers": 40, "dtype": "bfloat16", "device": "NVIDIA H200",
}  # fmt: skip


def row(seconds: float, flops: float, peak: float, weights: float, **case: Any) -> dict[str, Any]:
    return {
        "case": {**CASE, **case},
        "removed": 0.25 if case.get("asked") else 0.0,
        "extrapolated": False,
        "tokens_per_second": 4096 / seconds,
        "times": {"p50": seconds, "p90": 1.1 * seconds, "p99": 1.2 * seconds},
        "peak_memory": int(peak),
        "cache_bytes": 1000,
        "parameter_bytes": int(weights),
        "kv_bytes_per_token": 10,
        "flops": {"layers": int(flops), "total": int(flops)},
        "bytes": int(weights) + 1000,
        "floor_seconds": flops / 4e15,
    }


NARROW = {"kind": "trisect", "asked": "0.2", "widths": "96/96/11008"}
ROWS = [
    row(0.4, 4e14, 32e9, 26e9, attention="eager"),
    row(0.2, 4e14, 30e9, 26e9),
    row(0.19, 4e14, 30e9, 26e9, kind="owned"),
    row(0.16, 3e14, 22e9, 20e9, **NARROW),
    row(0.21, 3e14, 23e9, 20e9, kind="svd-llm", asked="0.2", widths="rank 1920"),
]


def test_a_table_has_speed_and_limit_beside_each_other() -> None:
    header, lines = cells(ROWS, "prefill", SPEED)
    narrow = dict(zip(header, lines[3], strict=True))
    assert narrow == {
        "model": "trisect 0.2",
        "widths": "96/96/11008",
        "run": "2 x 2048 sdpa",
        "tokens/s": "25,600.0",
        "p50 / p90 / p99 ms": "160 / 176 / 192",
        "speed-up": "1.250x",
        "limit": "1.333x",
        "of limit": "0.938",
        "over owned": "1.188x",
        "of peak": "0.469",
        "FLOPs of one layer": f"{3e14 / 40:.3g}",
    }
    dense = dict(zip(header, lines[1], strict=True))
    assert (dense["speed-up"], dense["of peak"]) == ("", "0.500")
    eager = dict(zip(header, lines[0], strict=True))
    assert eager["run"] == "2 x 2048 eager"
    header, lines = cells(ROWS, "prefill", MEMORY)
    narrow = dict(zip(header, lines[3], strict=True))
    assert (narrow["peak saved GB"], narrow["weights + cache removed GB"]) == ("8.000", "6.000")
    assert cells(ROWS, "decode", SPEED) == ([], [])


def test_columns_without_values_are_left_out() -> None:
    header, _ = cells([ROWS[1]], "prefill", SPEED)
    assert header == ["model", "widths", "run", "tokens/s", "p50 / p90 / p99 ms", "of peak", "FLOPs of one layer"]


def test_a_table_in_markdown() -> None:
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_notes_say_which_numbers_mean_something() -> None:
    (only,) = notes_for(ROWS)
    assert "wrong for accuracy" in only
    cpu = {**ROWS[0], "case": {**CASE, "device": "Xeon, 2 threads"}, "extrapolated": True}
    notes = " ".join(notes_for([cpu]))
    assert "extrapolated" in notes
    assert "On a CPU" in notes
    fast = {**ROWS[3], "floor_seconds": 2 * ROWS[3]["times"]["p50"]}
    (noise,) = notes_for([*ROWS, fast])[1:]
    assert "Faster than this device can be, so noise: trisect 0.2 (prefill)." in noise


def test_shapes_are_named_where_there_are_several() -> None:
    other = row(0.1, 1e14, 1e9, 1e9, subject="llama-3.2-3b")
    assert "shape" not in cells(ROWS, "prefill", SPEED)[0]
    header, lines = cells([*ROWS, other], "prefill", SPEED)
    assert header[0] == "shape"
    assert [line[0] for line in lines] == [CASE["subject"]] * len(ROWS) + ["llama-3.2-3b"]


def test_rows_compare_with_dense_rows_of_the_same_setting_only() -> None:
    found = related([*ROWS, row(0.1, 1e14, 1e9, 1e9, **NARROW, batch=4)])
    assert [entry.get("against_dense", {}).get("speedup") for entry in found[3:]] == [
        pytest.approx(1.25),
        pytest.approx(0.2 / 0.21),
        None,
    ]
    unknown = related([{**ROWS[1], "peak_memory": None}, ROWS[3]])
    assert unknown[1]["against_dense"]["peak_saved"] is None
