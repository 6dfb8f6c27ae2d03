"""`trisect bench` as a user meets it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bench_help import CEILINGS

from tiny_models import tiny
from trisect.bench import measure, sweep
from trisect.cli import main
from trisect.config import CompressConfig
from trisect.data.tokens import tokens_from_tensor
from trisect.models import save_model, shape_of
from trisect.pipeline.run import compress
from trisect.plan import budget_of

QUICK = ["--length", "8", "--new", "3", "--repeats", "2", "-q"]


@pytest.fixture(autouse=True)
def _known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring what this machine can do takes longer than all of these tests."""
    monkeypatch.setattr(measure, "measure_ceilings", lambda *args: CEILINGS)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny("llama-gqa").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def narrow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ids = torch.randint(3, 90, (8, 16), generator=torch.Generator().manual_seed(0))
    config = CompressConfig(ratio=0.4, method="a3", align=None)
    narrow = compress(tiny("llama-gqa"), config, tokens=tokens_from_tensor(ids))
    return save_model(narrow.model, None, tmp_path_factory.mktemp("narrow") / "small", receipt=narrow.receipt)


def test_a_compressed_model_is_timed_beside_its_dense_one(
    narrow_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measurement = tmp_path / "bench.json"
    assert main(["bench", str(narrow_folder), *QUICK, "--json", str(measurement)]) == 0
    shown = capsys.readouterr().out
    assert "prefill, speed" in shown
    assert "wrong for accuracy" in shown
    assert "On a CPU" in shown
    data = json.loads(measurement.read_text())
    assert [(row["case"]["kind"], row["case"]["asked"], row["case"]["phase"]) for row in data["rows"]] == [
        (*model, phase)
        for model in (("dense", ""), ("owned", ""), ("trisect", "checkpoint"))
        for phase in ("prefill", "decode")
    ]
    dense = tiny("llama-gqa")
    for row in data["rows"]:
        assert row["times"]["p50"] > 0
        assert row["tokens_per_second"] > 0
        compressed = row["case"]["kind"] == "trisect"
        assert (row["against_dense"]["limit"] > 1) == (row["removed"] > 0.3) == compressed
        same = row["parameter_bytes"] == sum(p.nbytes for p in dense.parameters())
        assert same == (not compressed)
        assert (row["kv_bytes_per_token"] == budget_of(shape_of(dense)).kv_bytes_per_token) == (not compressed)
    assert data["receipts"][0]["recipe"]["bench"] == str(narrow_folder)


def test_a_quantised_model_counts_its_packed_weights(narrow_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("hqq")
    packed, measurement = tmp_path / "packed", tmp_path / "bench.json"
    quantize = ["quantize", str(narrow_folder), "-o", str(packed), "--backend", "torchao", "--bits", "8", "-q"]
    assert main(quantize) == 0
    assert main(["bench", str(packed), *QUICK, "--json", str(measurement)]) == 0
    rows = json.loads(measurement.read_text())["rows"]
    held = {row["case"]["kind"]: row["parameter_bytes"] for row in rows}
    (whole,) = [sum(p.nbytes for p in tiny("llama-gqa").parameters())]
    assert held["dense"] == whole
    assert held["trisect"] < 0.7 * whole  # the embedding is not packed


def test_rows_that_fail_are_shown_and_end_in_a_code(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(model: object) -> None:
        raise RuntimeError("the device went away")

    monkeypatch.setattr(sweep, "prepare_for_inference", broken)
    measurement = tmp_path / "bench.json"
    assert main(["bench", str(model_folder), *QUICK, "--json", str(measurement)]) == 1
    assert "failed: " in (shown := capsys.readouterr().out)
    assert "the device went away" in shown
    assert [("error" in row) for row in json.loads(measurement.read_text())["rows"]] == [False, False, True, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["MODEL", "--batch", "0"], "--batch takes whole numbers"),
        (["MODEL", "--length", "x"], "--length takes whole numbers"),
        (["MODEL", "--phase", "train"], "Unknown phase"),
        (["MODEL", "--length", "4096"], "tokens, fewer than a prompt of"),
        (["MODEL", "--new", "4096"], "tokens, fewer than a prompt of"),
        (["MODEL", "--graphs"], "CUDA graphs need a CUDA device"),
        (["MODEL", "--repeats", "0"], "greater than or equal to 1"),
        (["MODEL", "--align", "7", "--latency-table", "t.json"], "Cannot align widths"),
        (["MODEL", "--dtype", "int8"], "Unknown dtype"),
        (["no-such-folder/x/y"], "There is no model"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    options: list[str], message: str, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    typed = [str(model_folder) if word == "MODEL" else word for word in options]
    assert main(["bench", *typed, "--json", str(out)]) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert len(shown) == 1
    assert shown[0].startswith("error: ")
    assert message in shown[0]
    assert not out.exists()


def test_models_are_timed_in_turn_and_each_as_often_as_asked(
    narrow_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever slows the machine down while one model runs slows the others down as well."""
    laps: list[tuple[int, int]] = []

    def counting(work: Callable[[], object], count: int) -> list[float]:
        laps.append((id(work), count))
        return [1.0] * count

    monkeypatch.setattr(measure, "laps_on", lambda device: counting)
    typed = ["--length", "8", "--new", "20", "--phase", "decode", "-q", "--json", str(tmp_path / "bench.json")]
    assert main(["bench", str(narrow_folder), *typed]) == 0
    works = [work for work, _ in laps]
    assert len(works) == 3 * sweep.TURNS
    assert works == works[:3] * sweep.TURNS
    for model in set(works):
        assert sum(count for work, count in laps if work == model) == 20


def test_a_speed_up_is_marked_noisy_when_either_of_its_two_models_was(
    narrow_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the dense model's laps are uneven here, and what is compared with it cannot be trusted."""

    def uneven(work: Callable[[], object], count: int) -> list[float]:
        stock = "StockStepper" in getattr(work, "__qualname__", "")
        return [2.0 if stock and lap % 2 else 1.0 for lap in range(count)]

    monkeypatch.setattr(measure, "laps_on", lambda device: uneven)
    typed = ["--length", "8", "--new", "20", "--phase", "decode", "-q", "--json", str(tmp_path / "bench.json")]
    assert main(["bench", str(narrow_folder), *typed]) == 0
    data = json.loads((tmp_path / "bench.json").read_text())
    assert [row["against_dense"]["noisy"] for row in data["rows"]] == [True, True, True]
    shown = " ".join(capsys.readouterr().out.split())
    assert "or more: dense (decode)." in shown
    assert "~1" in shown
