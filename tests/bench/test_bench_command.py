"""`trisect bench` as a user meets it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from bench_help import CEILINGS
from torch.nn import Linear
from torch.nn.modules.module import register_module_forward_hook

from tiny_models import tiny
from trisect.bench import measure, sweep
from trisect.cli import main

QUICK = ["--length", "8", "--new", "3", "--repeats", "2", "--align", "none", "-q"]


@pytest.fixture(autouse=True)
def _known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring what this machine can do takes longer than all of these tests."""
    monkeypatch.setattr(sweep.measure, "measure_ceilings", lambda *args: CEILINGS)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny("llama-gqa").save_pretrained(folder)
    return folder


def test_bench_measures_three_models_writes_them_and_resumes(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, measurement = tmp_path / "out", tmp_path / "bench.json"
    command = ["bench", str(model_folder), "--ratio", "0.4", *QUICK, "-o", str(out), "--json", str(measurement)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "prefill, speed" in shown
    assert "wrong for accuracy" in shown
    assert "On a CPU" in shown
    data = json.loads(measurement.read_text())
    assert [(row["case"]["kind"], row["case"]["phase"]) for row in data["rows"]] == [
        (kind, phase) for kind in ("dense", "trisect", "svd-llm") for phase in ("prefill", "decode")
    ]
    for row in data["rows"]:
        assert row["times"]["p50"] > 0
        assert row["tokens_per_second"] > 0
        assert row["against_dense"]["limit"] >= 1
    assert {path.name for path in out.iterdir()} == {"rows.json", "rows.csv", "table.md", "figures"}
    rows = (out / "rows.json").read_bytes()
    assert main(command) == 0
    assert (out / "rows.json").read_bytes() == rows
    assert main([*command, "--attention", "eager", "--phase", "prefill", "--no-figures"]) == 0
    assert len(json.loads((out / "rows.json").read_text())["rows"]) == 9
    (out / "table.md").unlink()
    assert main(["bench", "--no-run", "-o", str(out)]) == 0
    assert "FLOPs of one layer" in (out / "table.md").read_text()


def counted_laps(work: Callable[[], object], count: int) -> list[float]:
    """A lap takes as many seconds as linear maps were called in it: no clock, so no noise."""
    seconds = []
    for _ in range(count):
        calls: list[object] = []
        handle = register_module_forward_hook(
            lambda module, args, output, calls=calls: calls.append(module) if isinstance(module, Linear) else None
        )
        work()
        handle.remove()
        seconds.append(float(len(calls)))
    return seconds


def test_widths_are_benched_as_they_are_given(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_cpu_laps", counted_laps)
    measurement = tmp_path / "bench.json"
    command = ["bench", str(model_folder), "--widths", "8/12/40", "--phase", "prefill", "--variants", "trisect"]
    assert main([*command, *QUICK, "--layers", "2", "--json", str(measurement)]) == 0
    (row,) = json.loads(measurement.read_text())["rows"]
    assert (row["case"]["widths"], row["case"]["asked"], row["extrapolated"]) == ("8/12/40", "8/12/40", True)
    assert "against_dense" not in row


def test_rows_that_fail_are_shown_and_end_in_a_code(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **settings: object) -> None:
        raise RuntimeError("the device went away")

    monkeypatch.setattr(sweep, "build", broken)
    assert main(["bench", str(model_folder), "--variants", "dense", *QUICK, "-o", str(tmp_path / "out")]) == 1
    assert "failed: " in (shown := capsys.readouterr().out)
    assert "the device went away" in shown
    assert len(json.loads((tmp_path / "out/rows.json").read_text())["rows"]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Give a MODEL or --shape NAME"),
        (["--shape", "llama-2-13"], "Did you mean llama-2-13b"),
        (["MODEL", "--shape", "llama-2-13b"], "one of them"),
        (["MODEL", "--ratio", "a"], "fractions such as"),
        (["MODEL", "--ratio", "1.5"], "above 0 and below 1"),
        (["MODEL", "--ratio", "0.4"], "--align none"),
        (["MODEL", "--widths", "1/2"], "write QK/VO/MLP"),
        (["MODEL", "--batch", "0"], "--batch takes whole numbers"),
        (["MODEL", "--length", "x"], "--length takes whole numbers"),
        (["MODEL", "--attention", "flash"], "Unknown attention"),
        (["MODEL", "--phase", "train"], "Unknown phase"),
        (["MODEL", "--variants", "svd"], "Unknown variant"),
        (["MODEL", "--graphs"], "CUDA graphs need a CUDA device"),
        (["MODEL", "--layers", "9"], "from 2 to 3"),
        (["MODEL", "--repeats", "0"], "at least 1"),
        (["MODEL", "--align", "7"], "Cannot align widths"),
        (["MODEL", "--dtype", "int8"], "Unknown dtype"),
        (["--no-run"], "name their folder with -o"),
        (["no-such-folder/x/y"], "There is no model"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    options: list[str], message: str, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    typed = [str(model_folder) if word == "MODEL" else word for word in options]
    extra = [] if "--no-run" in options else ["-o", str(out)]
    assert main(["bench", *typed, *extra]) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert len(shown) == 1
    assert shown[0].startswith("error: ")
    assert message in shown[0]
    assert not out.exists()
