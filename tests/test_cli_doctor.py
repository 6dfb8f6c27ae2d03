"""`trisect doctor`: what is in order, what is not, what to type; what the table says, --json says."""

import json
from pathlib import Path

import pytest

from trisect.cli import main
from trisect.commands import start as doctor

LINES = [
    "inside>=2",
    "gone>=1",
    "old>=3",
    'helper>=1; extra == "speed"',
    'absent>=1; extra == "speed"',
    "elsewhere>=1; platform_system == 'Nowhere'",
]
VERSIONS = {"trisect": "0.1.0", "inside": "2.5", "old": "2.9.1", "helper": "1.0"}


def test_the_table_the_json_and_the_code_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", str(tmp_path / "d.json")])
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "d.json").read_text())
    states = {entry["subject"]: entry["state"] for entry in report["findings"]}
    assert report["problems"] == list(states.values()).count("problem")
    assert code == (1 if report["problems"] else 0)
    assert {"Python", "torch build", "cpu", "hub"} <= states.keys()
    assert states["self-check on cpu"] == "ok"
    assert all(subject in shown for subject in states)


def test_a_problem_is_named_and_ends_in_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "requirements", lambda: ["gone>=1"])
    monkeypatch.setattr(doctor, "check_run", lambda: ())
    assert main(["doctor", "--quiet"]) == 1
    shown = capsys.readouterr().out
    assert "1 to fix: gone" in shown
    assert "Python" not in shown  # it is in order, and --quiet leaves that out


def test_requirements_come_from_the_package_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requirements", lambda: LINES)
    monkeypatch.setattr(doctor.receipt, "package_version", VERSIONS.get)
    found = {entry.subject: entry for entry in doctor.check_packages()}
    assert {name: entry.state for name, entry in found.items()} == {
        "Python": "ok",
        "inside": "ok",
        "gone": "problem",
        "old": "problem",
        "helper": "ok",
        "absent": "note",
    }
    assert found["gone"].fix == 'pip install "gone>=1"'
    assert found["absent"].fix == 'pip install "absent>=1"'
    assert found["old"].says == "2.9.1; trisect needs >=3"


@pytest.mark.parametrize(("answers", "state"), [(True, "ok"), (False, "note")])
def test_a_hub_out_of_reach_is_a_note(answers: bool, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trisect.data.read.hub_answers", lambda: answers)
    (finding,) = doctor.check_hub()
    assert finding.state == state
    assert bool(finding.fix) == (not answers)


def test_a_run_that_fails_is_a_finding_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel\nimage")

    monkeypatch.setattr("trisect.compress", broken)
    finding = next(iter(doctor.check_run()))
    assert finding.state == "problem"
    assert finding.says == "RuntimeError: no kernel image"
