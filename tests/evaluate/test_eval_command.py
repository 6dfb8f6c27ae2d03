"""`trisect eval --tasks` as a user meets it."""

import json
from pathlib import Path

import pytest
from local_tasks import load_locally

from trisect.cli import main


@pytest.fixture(autouse=True)
def _task_files(assets: Path) -> None:
    pytest.importorskip("lm_eval", reason="the extra trisect[eval] is not installed")
    if not (assets / "data" / "tasks").is_dir():
        pytest.skip(f"no task files at {assets}/data/tasks")


def test_the_command_prints_a_table_and_writes_scores_beside_perplexity(
    random_model, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trisect.evaluate.tasks.load_task", load_locally)
    for part in random_model:
        part.save_pretrained(tmp_path / "model")
    arguments = [str(tmp_path / "model"), "--tasks", "openbookqa:0,winogrande", "--shots", "1", "--limit", "2"]
    assert main(["eval", *arguments, "--json", str(tmp_path / "tasks.json"), "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 500" in printed
    assert "average" in printed
    tasks = json.loads((tmp_path / "tasks.json").read_text())
    assert set(tasks) == {"model", "tasks"}
    assert [score["shots"] for score in tasks["tasks"]["scores"].values()] == [0, 1]
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    text = ["--data", str(tmp_path / "text.txt"), "--length", "32", "--json", str(tmp_path / "both.json")]
    assert main(["eval", *arguments, *text, "--quiet"]) == 0
    both = json.loads((tmp_path / "both.json").read_text())
    assert both["tasks"] == tasks["tasks"]
    assert both["perplexity"] > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "arc_chalenge"], "Did you mean arc_challenge?"),
        (["--limit", "5"], "add --tasks"),
        (["--tasks", "quick", "--limit", "-1"], "--limit 1 or more"),
        (["--tasks", "quick"], "lm-eval could not load winogrande"),
    ],
)
def test_a_bad_command_fails_before_a_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "org/no-such-model", *arguments]) == 2
    assert message in capsys.readouterr().err
