"""`trisect doctor`: what is in order, what is not, what to type; findings against torch's own answers."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

from trisect.cli import main
from trisect.commands import _checkup as machine
from trisect.commands import _checkup_files as files
from trisect.commands._checkup import NOTE, OK, PROBLEM
from trisect.data.registry import REGISTRY_MODELS

LINES = [
    "inside>=2",
    "gone>=1",
    "old>=3",
    'helper>=1; extra == "speed"',
    'absent>=1; extra == "speed"',
    "elsewhere>=1; platform_system == 'Nowhere'",
]
VERSIONS = {"trisect": "0.1.0", "inside": "2.5", "old": "2.9.1", "helper": "1.0"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of our own: the real one is somebody's."""
    monkeypatch.setenv("TRISECT_CACHE", str(tmp_path / "cache"))
    for name in ("TRISECT_ASSETS", "TRISECT_DATA"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


def test_the_table_the_json_and_the_code_agree(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["doctor", "--json", str(tmp_path / "d.json")])
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "d.json").read_text())
    states = {entry["subject"]: entry["state"] for entry in report["findings"]}
    assert report["problems"] == list(states.values()).count(PROBLEM)
    assert code == (1 if report["problems"] else 0)
    assert {
        "Python",
        "torch build",
        "SDPA on cpu",
        "threads",
        "cache folder",
        "smollm2-135m",
    } <= states.keys()
    assert states["self-check on cpu"] == OK
    assert all(subject.split(" [")[0] in shown for subject in states)


def test_a_problem_is_named_and_ends_in_code_1(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRISECT_DATA", "nowhere")
    monkeypatch.setattr(files, "check_run", lambda devices: iter(()))
    assert main(["doctor", "--quiet"]) == 1
    shown = capsys.readouterr().out
    assert "no folder nowhere" in shown
    assert "to fix: " in shown
    assert "Python" not in shown  # it is in order, and --quiet leaves that out


def test_requirements_come_from_the_package_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"Requires-Dist": LINES, "Provides-Extra": ["speed"]}
    monkeypatch.setattr(machine, "_metadata", fields.__getitem__)
    monkeypatch.setattr(machine, "package_version", VERSIONS.get)
    found = {entry.subject: entry for entry in machine.check_packages()}
    assert {name: entry.state for name, entry in found.items()} == {
        "trisect": OK,
        "inside": OK,
        "gone": PROBLEM,
        "old": PROBLEM,
        "helper [speed]": OK,
        "absent [speed]": NOTE,
    }
    assert found["gone"].fix == "pip install trisect"
    assert found["absent [speed]"].fix == 'pip install "trisect[speed]"'
    assert "2.9.1, but trisect needs >=3" in found["old"].says


def test_a_source_tree_that_is_not_installed_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_metadata", lambda field: [])
    (finding,) = machine.check_packages()
    assert finding.state == NOTE
    assert "pip install -e ." in finding.fix


def test_a_python_that_is_too_old_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_metadata", lambda field: [">=99"])
    (finding,) = machine.check_python()
    assert finding.state == PROBLEM
    assert ">=99" in finding.fix


@pytest.mark.parametrize("widths", [(64, 64), (64, 48), (41, 41)])
def test_usable_attention_holds_what_torch_itself_would_choose(widths: tuple[int, int]) -> None:
    usable = machine.usable_backends("cpu", *widths)
    query, value = torch.ones(1, 2, 16, widths[0]), torch.ones(1, 2, 16, widths[1])
    choice = SDPBackend(torch._fused_sdp_choice(query, query, value, is_causal=True))
    names = {SDPBackend.FLASH_ATTENTION: "flash", SDPBackend.MATH: "math"}
    assert names[choice] in usable
    assert "math" in usable
    assert "cudnn" not in usable


def test_threads_that_crowd_the_cores_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine._threads(10**4).state == NOTE
    assert "OMP_NUM_THREADS=" in machine._threads(10**4).fix
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: range(8), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert machine._threads(2).fix == "unset OMP_NUM_THREADS to use them all"
    assert machine._threads(8).state == OK


def test_a_cache_that_cannot_be_written_is_a_problem(cache: Path) -> None:
    cache.write_text("in the way")
    (finding,) = files.check_cache()
    assert finding.state == PROBLEM
    assert "TRISECT_CACHE" in finding.fix


def test_the_size_of_the_cache_is_counted(cache: Path) -> None:
    (fresh,) = files.check_cache()
    assert "made when it is needed" in fresh.says
    assert not cache.exists()
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "a").write_bytes(bytes(3_000_000))
    (finding,) = files.check_cache()
    assert f"{cache}: 3 MB in 1 files" in finding.says


def test_a_damaged_demo_model_is_a_problem_and_a_missing_one_is_not(cache: Path) -> None:
    (finding,) = files.check_demo_model()
    assert (finding.state, finding.fix) == (NOTE, "trisect demo fetches it")
    name, record = next(iter(REGISTRY_MODELS.items()))
    path = cache / "models" / name / Path(record.member).name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half of it")
    (finding,) = files.check_demo_model()
    assert finding.state == PROBLEM
    assert str(path) in finding.fix


def test_assets_are_where_the_environment_says(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    monkeypatch.setenv("TRISECT_ASSETS", str(cache))
    first, second = files.check_assets()
    assert (first.state, second.state) == (PROBLEM, OK)
    (cache / "data").mkdir()
    assert next(files.check_assets()).state == OK


def test_a_run_that_fails_is_a_finding_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel\nimage")

    monkeypatch.setattr("trisect.compress", broken)
    (finding,) = files.check_run(["cpu"])
    assert finding.state == PROBLEM
    assert finding.says == "RuntimeError: no kernel image"
