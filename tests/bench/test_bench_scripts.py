"""The scripts in benchmarks/ run from end to end, on a CPU and with a model of two layers."""

import json
from pathlib import Path

import pytest
import sweeps
from bench_help import CEILINGS, flop_laps, subject

from loading import module_at

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps.measure, "measure_ceilings", lambda *args: CEILINGS)
    monkeypatch.setattr(sweeps.measure, "laps_on", lambda device: flop_laps)


def test_the_gpu_script_shows_every_section_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    h200 = module_at(FOLDER / "h200.py")
    command = ["--out", str(tmp_path), "--tiny", "--device", "cpu"]
    assert h200.main(command) == 0
    shown = capsys.readouterr().out
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("section ")] == [
        f"{name}:" for name in h200.SECTIONS
    ]
    rows = json.loads((tmp_path / h200.ROWS).read_text())["rows"]
    sizes = {(row["case"]["phase"], row["case"]["batch"]) for row in rows if row["case"]["subject"] == h200.SHAPE}
    assert {("prefill", 2), ("decode", 1), ("decode", 32)} <= sizes
    asked = {row["case"]["asked"] for row in rows if row["case"]["kind"] == "svd-llm"}
    assert asked == {"0.2", "0.4", "0.6"}
    assert any(row["case"]["folded"] for row in rows)
    assert {"widths", "speed-up", "limit", "of limit"} <= {
        word.strip() for line in shown.splitlines() if line.startswith("| model") for word in line.split("|")
    }
    table = json.loads((tmp_path / "latency-llama-2-13b.json").read_text())
    assert {entry["component"] for entry in table["entries"]} == {"qk", "ov", "mlp", "rest"}
    before = (tmp_path / h200.ROWS).read_bytes()
    assert h200.main([*command, "main", "eager"]) == 0
    assert (tmp_path / h200.ROWS).read_bytes() == before


def test_no_row_is_begun_when_the_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    h200 = module_at(FOLDER / "h200.py")
    assert h200.main(["--out", str(tmp_path), "--tiny", "--device", "cpu", "--budget", "-1", "main"]) == 0
    assert "no time left for main" in capsys.readouterr().out
    assert not (tmp_path / h200.ROWS).exists()
    with pytest.raises(SystemExit):
        h200.main(["--out", str(tmp_path), "nothing"])


def test_the_cpu_script_writes_its_receipt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = module_at(FOLDER / "cpu_smollm2.py")
    wide = subject("llama-gqa", head_dim=64, intermediate_size=512)  # enough for the grid
    monkeypatch.setattr(cpu, "subject_of_model", lambda name: wide)
    monkeypatch.setattr(cpu.torch, "set_num_threads", lambda number: None)
    path = tmp_path / "receipt.json"
    assert cpu.main(path, length=16, new=4, rounds=3) == 0
    data = json.loads(path.read_text())
    assert all(sorted(row["p50_of_rounds"])[1] == row["times"]["p50"] for row in data["rows"])
    kinds = [row["case"]["kind"] for row in data["rows"] if row["case"]["phase"] == "prefill"]
    assert kinds == ["dense", "owned", "trisect", "svd-llm"]
    assert all("against_dense" in row for row in data["rows"])
    assert any("On a CPU" in note for note in data["notes"])
    monkeypatch.setattr(cpu, "run_sweep", lambda *given, **named: pytest.fail("measured again"))
    assert cpu.main(path, length=16, new=4) == 0
    assert json.loads(path.read_text()) == data
