"""A run that dies goes on where it stopped, and ends with the same bytes."""

import json
from pathlib import Path

import pytest
from scale_runs import TOKENS, assert_same, config

import trisect.pipeline.run as pipeline
from tiny_models import tiny
from trisect.errors import TrisectError
from trisect.pipeline.run import compress
from trisect.support.distributed import unfinished
from trisect.support.files import locked

METHODS = ["a3", "a3+", "svd-llm-sequential"]


class Killed(BaseException):
    pass


def killed_run(out: Path, solves: int, method: str, name: str = "llama-gqa") -> Path:
    """A run that died after so many solves; the folder it left."""
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, solves)
        try:
            with unfinished(out) as work:
                compress(tiny(name), config(method), tokens=TOKENS, work=work)
        except Killed:
            return work
    raise AssertionError("the run was to be killed")


def interrupt_after(monkeypatch: pytest.MonkeyPatch, solves: int) -> list[int]:
    """Dies in the middle of the solve after so many; says which layers were solved."""
    done: list[int] = []
    real = pipeline.solve_step

    def solve_step(run, view, *rest):
        if len(done) == solves:
            raise Killed
        done.append(view.index)
        return real(run, view, *rest)

    monkeypatch.setattr(pipeline, "solve_step", solve_step)
    return done


@pytest.mark.parametrize(
    ("name", "method", "solves"),
    [*(("llama-gqa", method, solves) for method in METHODS for solves in (2, 4, 7)), ("mixtral", "a3+", 4)],
)
def test_what_was_finished_is_not_solved_again_and_the_result_is_the_same(
    name: str, method: str, solves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = compress(tiny(name), config(method), tokens=TOKENS)
    out = tmp_path / "out"
    work = killed_run(out, solves, method, name)
    finished = {int(file.stem[-5:]) for file in work.glob("layer-*")}
    solved = interrupt_after(monkeypatch, 10**6)
    with unfinished(out) as work:
        result = compress(tiny(name), config(method), tokens=TOKENS, work=work)
    assert not finished & set(solved)
    assert finished | set(solved) == {0, 1, 2}
    assert_same(dict(result.model.state_dict()), dict(expected.model.state_dict()))
    assert result.losses == expected.losses
    assert not work.exists()


def test_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed_run(out, 4, "a3")
    other = config("a3", seed=1)
    with pytest.raises(TrisectError, match=r"config\.seed was 0, is 1.*--fresh"), unfinished(out) as work:
        compress(tiny("llama-gqa"), other, tokens=TOKENS, work=work)
    with pytest.raises(TrisectError, match="model was"), unfinished(out) as work:
        compress(tiny("qwen2"), config("a3"), tokens=TOKENS, work=work)
    assert list(work.glob("layer-*"))
    with unfinished(out, fresh=True) as work:
        compress(tiny("llama-gqa"), other, tokens=TOKENS, work=work)
    assert not work.exists()


def test_a_smaller_batch_may_finish_what_a_larger_one_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_run(tmp_path / "out", 4, "a3")
    solved = interrupt_after(monkeypatch, 10**6)
    with unfinished(tmp_path / "out") as work:
        compress(tiny("llama-gqa"), config("a3", calibration={"batch_size": 1}), tokens=TOKENS, work=work)
    assert set(solved) == {1, 2}  # layer 0 was there
    assert not work.exists()


def test_two_runs_on_one_output_lock_each_other_out(tmp_path: Path) -> None:
    with unfinished(tmp_path / "out") as work:
        with (
            pytest.raises(TrisectError, match="Another run is writing"),
            locked(work / "lock", "Another run is writing"),
        ):
            pass
        with pytest.raises(TrisectError, match="wait for it"), unfinished(tmp_path / "out"):
            pass
        assert work.is_dir()


def test_a_run_that_fails_at_once_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TrisectError), unfinished(tmp_path / "out") as work:
        compress(tiny("llama-gqa"), config("a3", layers=(99,)), tokens=TOKENS, work=work)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["", "{", "[]", json.dumps({"trisect": "0.0"})])
def test_a_damaged_manifest_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    work = killed_run(tmp_path / "out", 4, "a3")
    (work / "manifest.json").write_text(damage)
    with pytest.raises(TrisectError, match=r"out\.unfinished.*--fresh"), unfinished(tmp_path / "out") as work:
        compress(tiny("llama-gqa"), config("a3"), tokens=TOKENS, work=work)


def test_a_truncated_layer_is_refused_by_name(tmp_path: Path) -> None:
    work = killed_run(tmp_path / "out", 4, "a3")
    file = work / "layer-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(TrisectError, match=r"layer-00000.*remove it"), unfinished(tmp_path / "out") as work:
        compress(tiny("llama-gqa"), config("a3"), tokens=TOKENS, work=work)
    file.unlink()
    with unfinished(tmp_path / "out") as work:
        compress(tiny("llama-gqa"), config("a3"), tokens=TOKENS, work=work)
