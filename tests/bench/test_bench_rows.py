"""Sweeps: every case has a row, failures too; rows that are there stay; slices stand for wholes."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import sweeps
import torch
from bench_help import CEILINGS, KINDS, flop_laps, measured, subject, tiny_variants
from sweeps import Rows, whole_from

from trisect.bench.measure import Effort, laps_on, measure_ceilings
from trisect.bench.rows import Case, related
from trisect.bench.sweep import Sweep, cases_of
from trisect.errors import TrisectError


def test_a_clock_runs_the_work_as_often_as_asked() -> None:
    calls: list[int] = []
    laps = laps_on("cpu")(lambda: calls.append(1), 7)
    assert len(calls) == len(laps) == 7
    assert min(laps) >= 0
    assert flop_laps(lambda: torch.ones(2, 3) @ torch.ones(3, 5), 1) == [60.0]


def test_nothing_waits_for_a_gpu_between_its_laps(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            log.append("record")
            self.at = len(log)

        def elapsed_time(self, later: "Event") -> float:
            return float(later.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    laps = laps_on("cuda")(lambda: log.append("work"), 3)
    assert log == ["wait", "record", *["work", "record"] * 3, "wait"]
    assert laps == [0.002] * 3  # events count in milliseconds


def test_every_case_of_a_sweep_has_a_row() -> None:
    name = subject("llama-gqa")
    variants = tiny_variants(name, ("dense", "trisect"))
    rows, tally = measured(name, variants, lengths=(8, 12), batches=(1, 2), attentions=("eager", "sdpa"))
    assert (tally.measured, tally.done, tally.failed) == (2 * 2 * 2 * 2 * 2, 0, 0)
    cases = {tuple(row["case"].values()) for row in rows.rows}
    assert len(cases) == len(rows.rows) == tally.measured
    assert [receipt["recipe"]["bench"] for receipt in rows.receipts] == ["llama-gqa"]
    assert rows.receipts[0]["recipe"]["ceilings"] == asdict(CEILINGS)
    assert "wrong for accuracy" in rows.receipts[0]["recipe"]["weights"]


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3", "gpt2"])
def test_on_a_device_held_by_flops_alone_the_speedup_is_its_limit(family: str) -> None:
    """The clock counts matrix products; the limit has softmax, norms and residuals too, some percent here."""
    name = subject(family)
    rows, _ = measured(name, tiny_variants(name), phases=("prefill",), lengths=(16,))
    for row in related(rows.rows):
        against = row["against_dense"]
        assert against["share_of_limit"] == pytest.approx(1.0, abs=0.02)
        assert (against["speedup"] > 1.2) == (row["case"]["kind"] in ("trisect", "svd-llm"))
        tokens = 2 * 16 / row["times"]["p50"]
        assert row["tokens_per_second"] == pytest.approx(tokens)


def test_the_limit_of_decoding_is_the_ratio_of_bytes() -> None:
    name = subject("llama-gqa")
    rows, _ = measured(name, tiny_variants(name), phases=("decode",))
    dense, _, narrow, factored = related(rows.rows)
    assert narrow["against_dense"]["limit"] == dense["bytes"] / narrow["bytes"]
    # The narrow model reads less of the cache; a factored one reads all of it.
    weights = [row["parameter_bytes"] - 4 * 97 * 48 for row in (dense, narrow, factored)]
    cached = [row["bytes"] - weight for row, weight in zip((dense, narrow, factored), weights, strict=True)]
    assert cached[0] == cached[2] == 2 * (12 + 4 / 2 + 1) * dense["kv_bytes_per_token"]
    assert cached[1] == 2 * (12 + 4 / 2 + 1) * narrow["kv_bytes_per_token"] < cached[0]
    assert narrow["cache_bytes"] == 2 * (12 + 4) * narrow["kv_bytes_per_token"]
    removed = sum(dense[key] - narrow[key] for key in ("parameter_bytes", "cache_bytes"))
    assert narrow["against_dense"]["removed_bytes"] == removed > 0


def test_the_least_time_is_the_larger_of_flops_and_bytes() -> None:
    assert CEILINGS.floor(flops=3e9, moved=1e9) == 3.0
    assert CEILINGS.floor(flops=1e9, moved=5e9) == 5.0  # the faster of copying and reading counts
    seconds = measure_ceilings("cpu", torch.float32, lambda work, n: [2.0] * n, matrix=8, size=4096)
    assert (seconds.flops, seconds.copy_bytes, seconds.read_bytes) == (2 * 8**3 / 2, 4096.0, 2048.0)


def test_rows_that_are_there_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, path = subject("llama-gqa"), tmp_path / "rows.json"
    variants = tiny_variants(name)
    measured(name, variants[:2], Rows.open(path))
    first = path.read_bytes()
    rows, tally = measured(name, variants[:2], Rows.open(path))
    assert (tally.measured, tally.done) == (0, 4)
    assert path.read_bytes() == first
    rows, tally = measured(name, variants, Rows.open(path))
    assert (tally.measured, tally.done) == (4, 4)
    assert len(rows.receipts) == 2
    assert [row["receipt"] for row in rows.rows] == [0] * 4 + [1] * 4


def test_a_failure_is_a_row_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, path = subject("llama-gqa"), tmp_path / "rows.json"
    real = sweeps.measured_row

    def broken(model: Any, variant: Any, case: Case, **settings: Any) -> dict[str, Any]:
        if case.kind == "trisect" and case.phase == "prefill":
            raise RuntimeError("out of memory\nwith a second line")
        return real(model, variant, case, **settings)

    monkeypatch.setattr(sweeps, "measured_row", broken)
    rows, tally = measured(name, tiny_variants(name), Rows.open(path))
    assert (tally.measured, tally.failed) == (7, 1)
    (bad,) = [row for row in json.loads(path.read_text())["rows"] if "error" in row]
    assert bad["error"].startswith("RuntimeError: out of memory")
    assert bad["traceback"][-2:] == ["RuntimeError: out of memory", "with a second line"]
    assert len(related(rows.rows)) == 8
    # It is tried again, unless errors are to be kept.
    monkeypatch.setattr(sweeps, "measured_row", real)
    again = Rows.open(path)
    assert all(again.done(Case(**row["case"]), keep_errors=True) for row in again.rows)
    _, tally = measured(name, tiny_variants(name), again)
    assert (tally.measured, tally.done, tally.failed) == (1, 7, 0)
    assert not any("error" in row for row in json.loads(path.read_text())["rows"])


def test_a_model_that_cannot_be_built_fails_all_its_rows_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    name = subject("phi3-longrope")
    variants = tiny_variants(name, ("dense", "trisect"), folded=True)
    rows, tally = measured(name, variants, lengths=(8,))
    assert (tally.measured, tally.failed) == (2, 2)
    assert {row["case"]["kind"] for row in rows.rows if "error" in row} == {"trisect"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_of_the_layers_stands_for_the_whole_model(kind: str) -> None:
    """In FLOPs, extrapolating from a slice and from one layer is exact."""
    name = subject("llama-gqa", num_hidden_layers=7)
    variants = tiny_variants(name, (kind,))
    whole, _ = measured(name, variants, phases=("prefill",))
    part, _ = measured(name, variants, phases=("prefill",), layers=3)
    (full,), (cut,) = whole.rows, part.rows
    assert cut["extrapolated"]
    assert not full["extrapolated"]
    assert cut["times"]["p50"] == pytest.approx(full["times"]["p50"])
    same = ("parameter_bytes", "cache_bytes", "kv_bytes_per_token", "flops", "bytes", "removed")
    assert {key: cut[key] for key in same} == {key: full[key] for key in same}
    assert Case(**cut["case"]).setting() != Case(**full["case"]).setting()


def test_a_slice_that_says_nothing_about_the_rest_is_no_figure() -> None:
    assert whole_from(5.0, 2.0, measured=4, layers=10) == 5.0 + 6 * 1.0
    with pytest.raises(TrisectError, match="use more --layers"):
        whole_from(1.0, 2.0, measured=4, layers=10)


def test_a_model_switches_attention_or_says_that_it_cannot() -> None:
    name = subject("mpt")
    rows, tally = measured(name, tiny_variants(name, ("dense", "trisect")), attentions=("eager", "sdpa"))
    assert (tally.measured, tally.failed) == (4, 4)
    assert all("use --attention eager" in row["error"] for row in rows.rows if "error" in row)


def test_graphs_time_a_plain_prefill_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps.measure, "is_cuda", lambda device: True)
    sweep = Sweep(modes=("plain", "graphs", "compile"))
    monkeypatch.undo()
    name = subject("llama-gqa")
    (variant,) = tiny_variants(name, ("dense",))
    found = [(case.phase, case.mode) for case in cases_of(name.name, variant, sweep)]
    prefill = [("prefill", "plain"), ("prefill", "compile")]
    assert found == prefill + [("decode", mode) for mode in ("plain", "graphs", "compile")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"phases": ("prefil",)}, "Did you mean prefill"),
        ({"modes": ("graphs",)}, "--device cuda"),
        ({"dtype": "int8"}, "Known: bfloat16"),
        ({"batches": (0,)}, "at least 1"),
        ({"device": "gpu"}, "Unknown device"),
        ({"device": "meta"}, "holds no numbers"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrisectError, match=message):
        Sweep(**settings)


def test_efforts_of_nothing_are_refused() -> None:
    for settings in ({"repeats": 0}, {"steps": 0}):
        with pytest.raises(TrisectError, match="greater than or equal to 1"):
            Effort(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 9, "rows": [], "receipts": []}', '{"rows": [{}]}'])
def test_a_file_that_holds_no_rows_is_refused_and_left(content: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(TrisectError, match="does not hold rows of a benchmark"):
        Rows.open(path)
    assert path.read_text() == content


def test_several_sweeps_build_each_model_once_and_stop_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    name = subject("llama-gqa")
    built: list[str] = []
    real = sweeps.build

    def building(given: Any, variant: Any, **settings: Any) -> Any:
        built.append(variant.kind)
        return real(given, variant, **settings)

    monkeypatch.setattr(sweeps, "build", building)
    several = [
        Sweep(phases=("prefill",), lengths=(16,), attentions=("eager",)),
        Sweep(phases=("decode",), lengths=(8,), new=2, attentions=("eager",)),
    ]
    rows, settings = Rows(), {"ceilings": CEILINGS, "lap": flop_laps, "effort": Effort(repeats=1)}
    variants = tiny_variants(name, ("dense", "trisect"))
    answers = iter([False, False, False, True])
    tally = sweeps.run_sweep(name, variants, several, rows, stop=lambda: next(answers), **settings)
    assert (tally.measured, built) == (3, ["dense", "trisect"])
    tally = sweeps.run_sweep(name, variants, several, rows, **settings)
    assert (tally.measured, tally.done) == (1, 3)
    found = [(row["case"]["kind"], row["case"]["phase"], row["case"]["length"]) for row in rows.rows]
    assert found == [(kind, *size) for kind in ("dense", "trisect") for size in (("prefill", 16), ("decode", 8))]
