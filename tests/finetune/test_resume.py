"""A run that was stopped, by Ctrl-C or by a crash, ends with the very bits of one that was not."""

import json
import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tuning import compressed, examples, settings

from trisect.errors import TrisectError
from trisect.finetune import TuneConfig, finetune
from trisect.finetune.training import WARM_UP, last_checkpoint, rate_at

CONFIG = settings(epochs=4, lr=1e-2)
STEPS = 6
NAME = "gpt2"
"""Its dropout draws random numbers, so that a run that forgets them ends elsewhere."""


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def undisturbed() -> tuple[dict[str, torch.Tensor], list[float]]:
    model = compressed(NAME)
    tuned = finetune(model, examples(), CONFIG)
    assert tuned["steps"] == STEPS
    return weights(model), tuned["losses"]


class Crash(Exception):
    """The machine went away."""


def crash_at(step: int, path: Path, *, save_every: int) -> None:
    def progress(done: int, total: int) -> None:
        if done == step:
            raise Crash

    with pytest.raises(Crash):
        finetune(compressed(NAME), examples(), CONFIG, state=path, save_every=save_every, progress=progress)


@hypothesis_settings(max_examples=5)
@given(st.data())
def test_a_crash_at_any_step_leaves_no_trace(
    undisturbed: tuple[dict[str, torch.Tensor], list[float]],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("run") / "state"
    save_every = data.draw(st.integers(1, 3), label="save every")
    crashes = sorted(data.draw(st.sets(st.integers(save_every, STEPS), min_size=1, max_size=2), label="at"))
    for step in crashes:
        crash_at(step, path, save_every=save_every)
    model = compressed(NAME)
    tuned = finetune(model, examples(), CONFIG, state=path)
    expected, losses = undisturbed
    assert tuned["losses"] == losses
    now = weights(model)
    assert all(torch.equal(now[name], value) for name, value in expected.items())
    reached = crashes[-1]
    assert tuned["resumed_at"] == (reached if reached == STEPS else reached // save_every * save_every)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, whatever the shell that started the tests thinks of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_tuning_with_a_state_to_resume(tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        if done == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        finetune(compressed(), examples(), CONFIG, state=tmp_path / "run", save_every=2, progress=progress)
    tuned = finetune(compressed(), examples(), CONFIG, state=tmp_path / "run")
    assert tuned["resumed_at"] == 2


def test_tuning_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    finetune(compressed(), examples(), CONFIG, state=tmp_path / "run", save_every=2)
    assert capfd.readouterr().out == ""


def test_a_checkpoint_that_was_not_finished_is_passed_over(tmp_path: Path) -> None:
    crash_at(4, tmp_path / "run", save_every=2)
    newest = tmp_path / "run" / "checkpoint-4"
    shutil.copytree(newest, tmp_path / "run" / "checkpoint-3")
    (newest / "trainer_state.json").unlink()
    known = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert last_checkpoint(tmp_path / "run", known) == tmp_path / "run" / "checkpoint-3"


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stopped") / "state"
    tuned = finetune(compressed(), examples(), settings(max_steps=1), state=path)
    assert tuned["steps"] == 1
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": 2}, "rank was 4, is 2"),
        ({"lr": 0.5, "seed": 3}, "lr was 0.0002, is 0.5; seed was 0, is 3"),
        ({"targets": ("q",)}, "targets was None, is ['q']"),
    ],
)
def test_other_settings_are_named(changes: dict[str, Any], said: str, stopped_run: Path) -> None:
    before = {path: path.read_bytes() for path in stopped_run.rglob("*") if path.is_file()}
    with pytest.raises(TrisectError) as error:
        finetune(compressed(), examples(), settings(max_steps=1, **changes), state=stopped_run)
    assert said in str(error.value)
    assert {path: path.read_bytes() for path in stopped_run.rglob("*") if path.is_file()} == before


def test_another_model_and_other_data_are_named(stopped_run: Path) -> None:
    with pytest.raises(TrisectError, match="data was '"):
        finetune(compressed(), examples(seed=6), settings(max_steps=1), state=stopped_run)
    with pytest.raises(TrisectError, match="model was '"):
        finetune(compressed("llama-mha"), examples(), settings(max_steps=1), state=stopped_run)


@pytest.mark.parametrize("damaged", ["adapter_model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_a_damaged_state_is_refused(damaged: str, stopped_run: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped_run, tmp_path / "state")
    path = tmp_path / "state" / "checkpoint-1" / damaged
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TrisectError, match="cannot be resumed from"):
        finetune(compressed(), examples(), settings(max_steps=1), state=tmp_path / "state")


@given(st.integers(1, 400))
def test_the_rate_rises_then_falls_and_is_never_nothing(total: int) -> None:
    rates = [rate_at(step, total) for step in range(total)]
    assert all(0 < rate <= 1 for rate in rates)
    top = rates.index(max(rates))
    assert top == min(math.ceil(WARM_UP * total), total - 1)
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


def test_settings_out_of_range_are_refused_by_their_option() -> None:
    for changes, said in [
        ({"rank": 0}, "rank must be greater than or equal to 1"),
        ({"lr": 0.0}, "lr must be greater than 0"),
        ({"lr": float("nan")}, "lr must be"),
        ({"length": 1}, "length must be greater than or equal to 2"),
        ({"max_steps": 0}, "max_steps must be"),
        ({"loss": "prompt"}, "Known: all, response"),
    ]:
        with pytest.raises(TrisectError) as error:
            TuneConfig(**changes)
        assert said in str(error.value)
