"""Measurements end up at the model they are about; what is about nobody, or damaged, is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_runs import bench_file, eval_file, perplexity_entry, tasks_entry

from trisect.errors import TrisectError
from trisect.report.runs import Run, read_runs


def sides(run: Run, kind: str) -> dict[str, tuple[float | None, float | None]]:
    return {fact.quantity.name: (fact.before, fact.after) for fact in run.facts if fact.quantity.kind == kind}


def test_evaluations_of_the_run_and_of_its_source_are_after_and_before(real_run: Path, tmp_path: Path) -> None:
    other = {"token_hash": "b" * 64, "data": "data/wiki.txt"}
    files = [
        eval_file(tmp_path / "a.json", real_run, **perplexity_entry(7.5, **other)),
        eval_file(tmp_path / "b.json", real_run.parent / "dense", **perplexity_entry(6.5, **other)),
    ]
    found = sides(read_runs([real_run], files)[0], "perplexity")
    assert found == {"perplexity, text.txt": (20.0, 25.0), "perplexity, wiki.txt": (6.5, 7.5)}


def test_a_run_that_was_moved_is_known_by_its_name(real_run: Path, tmp_path: Path) -> None:
    file = eval_file(tmp_path / "a.json", "elsewhere/run", **perplexity_entry(7.5, token_hash="b" * 64))
    assert (None, 7.5) in sides(read_runs([real_run], [file])[0], "perplexity").values()


def test_files_in_a_runs_own_folder_belong_to_it_whatever_it_was_called(copied: Callable[..., Path]) -> None:
    folder = copied("renamed")
    (folder / "measurements").mkdir()
    eval_file(folder / "measurements" / "e.json", "old-name", tasks=tasks_entry(boolq=0.5))
    assert sides(read_runs([folder, copied("other")])[0], "task") == {"boolq": (None, 0.5)}


def test_task_averages_pair_up_only_where_the_same_questions_were_asked(real_run: Path, tmp_path: Path) -> None:
    dense = real_run.parent / "dense"
    files = [
        eval_file(tmp_path / "a.json", real_run, tasks=tasks_entry(boolq=0.5, piqa=0.7)),
        eval_file(tmp_path / "b.json", dense, tasks=tasks_entry(boolq=0.6, piqa=0.8)),
    ]
    found = sides(read_runs([real_run], files)[0], "task")
    assert found["boolq"] == (0.6, 0.5)
    assert found["average of 2 tasks"] == (pytest.approx(0.7), pytest.approx(0.6))
    eval_file(files[1], dense, tasks=tasks_entry(boolq=0.6, arc=0.8))
    run = read_runs([real_run], files)[0]
    averages = [fact for fact in run.facts if fact.quantity.name.startswith("average")]
    assert [(fact.before, fact.after) for fact in averages] == [(None, pytest.approx(0.6)), (pytest.approx(0.7), None)]


def test_bench_rows_give_the_speed_of_dense_and_compressed(real_run: Path, tmp_path: Path) -> None:
    file = bench_file(tmp_path / "bench.json", real_run, dense=0.5, narrow=0.25)
    run = read_runs([real_run], [file])[0]
    assert sides(run, "speed") == {"decode, 1 x 64 + 8 tokens": (2.0, 4.0)}


def test_a_quantised_run_is_not_given_the_perplexity_from_before_quantising(
    copied: Callable[..., Path], real_run: Path, tmp_path: Path
) -> None:
    inner = json.loads((real_run / "receipt.json").read_text())
    folder = copied("small", recipe={"quantize": {"bits": 4}}, made_from=inner, perplexity=None, losses=None, plan=None)
    receipt = json.loads((folder / "receipt.json").read_text())
    receipt = {key: value for key, value in receipt.items() if value is not None}
    (folder / "receipt.json").write_text(json.dumps({**receipt, "timings": {"quantise": 1.0}}))
    run = read_runs([folder])[0]
    assert sides(run, "perplexity") == {"perplexity, text.txt": (20.0, None)}
    assert run.source == str(real_run.parent / "dense")
    assert len(run.compression.losses) == 9
    assert run.timings["quantise"] == 1.0
    assert set(inner["timings"]) - {"compress"} < set(run.timings)
    both = {"before": perplexity_entry(25.0), "after": perplexity_entry(26.0)}
    file = eval_file(tmp_path / "q.json", real_run, out=str(folder), perplexity=both)
    assert sides(read_runs([folder], [file])[0], "perplexity") == {"perplexity, text.txt": (20.0, 26.0)}


def test_a_tuned_run_has_the_perplexity_from_after_tuning(copied: Callable[..., Path]) -> None:
    held_out = [{"before": perplexity_entry(25.0), "after": perplexity_entry(22.0)}]
    tuned = read_runs([copied("tuned", tuning=[{"held_out": held_out, "timings": {"finetune": 2.0}}])])[0]
    assert sides(tuned, "perplexity") == {"perplexity, text.txt": (20.0, 22.0)}
    assert tuned.timings["finetune"] == 2.0
    silent = read_runs([copied("silent", tuning=[{}])])[0]
    assert sides(silent, "perplexity") == {"perplexity, text.txt": (20.0, None)}


def test_runs_of_the_same_name_are_told_apart(copied: Callable[..., Path]) -> None:
    runs = read_runs([copied("a/run"), copied("b/run")])
    assert [run.name for run in runs] == ["a/run", "b/run"]


def refusal(runs: list[Path], files: list[Path] | None = None) -> str:
    with pytest.raises(TrisectError) as caught:
        read_runs(runs, files or [])
    return str(caught.value)


def test_what_is_no_run_is_refused_with_what_would_do(real_run: Path, tmp_path: Path) -> None:
    assert "does not exist" in refusal([tmp_path / "nothing"])
    assert "is a file" in refusal([real_run / "config.json"])
    assert "no config.json" in refusal([tmp_path])
    assert "no `trisect` entry; give a folder that `trisect compress -o` wrote" in refusal([real_run.parent / "dense"])
    assert "given twice" in refusal([real_run, real_run])


def test_a_missing_or_damaged_receipt_is_named(copied: Callable[..., Path]) -> None:
    folder = copied("run")
    (folder / "receipt.json").write_text("{")
    assert "receipt.json is not JSON" in refusal([folder])
    (folder / "receipt.json").write_text("[]")
    assert "no receipt of trisect" in refusal([folder])
    (folder / "receipt.json").unlink()
    assert "has no receipt.json" in refusal([folder])


@pytest.mark.parametrize(
    "changes",
    [
        {"losses": 3},
        {"losses": [3]},
        {"losses": [{"layer": -1, "component": "qk", "width": 1, "loss": 0, "total": 1}]},
        {"losses": [{"layer": 10**6, "component": "qk", "width": 1, "loss": 0, "total": 1}]},
        {"losses": [{"layer": 0, "component": [], "width": 1, "loss": 0, "total": 1}]},
        {"losses": [{"layer": 0, "component": "qk", "width": 1, "loss": "0", "total": 1}]},
        {"timings": []},
        {"timings": {"qk": "fast"}},
        {"tuning": [7]},
        {"perplexity": {"after": 7}},
        {"perplexity": {"after": {"perplexity": "low", "data": "x", "token_hash": "y"}}},
    ],
    ids=lambda changes: json.dumps(changes)[:50],
)
def test_every_wrong_part_of_a_receipt_is_one_clear_line(copied: Callable[..., Path], changes: dict[str, Any]) -> None:
    said = refusal([copied("run", **changes)])
    assert "receipt.json" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"model": "run", "perplexity": "x", "data": "a", "token_hash": "b"}',
        '{"model": "run", "tasks": {"scores": {"a": 1}}}',
        '{"rows": [7]}',
        '{"rows": [{"case": {"kind": [], "asked": ""}}]}',
        '{"rows": [{"case": {"kind": "dense", "asked": ""}}]}',
    ],
)
def test_files_that_are_no_measurement_are_named(real_run: Path, tmp_path: Path, content: str) -> None:
    file = tmp_path / "strange.json"
    file.write_text(content)
    assert "strange.json" in refusal([real_run], [file])


def test_a_measurement_of_another_model_is_refused(real_run: Path, tmp_path: Path) -> None:
    file = eval_file(tmp_path / "e.json", "org/other", **perplexity_entry(3.0))
    assert "is about 'org/other', which is neither a run given (run) nor" in refusal([real_run], [file])
