"""A run that was stopped, by Ctrl-C or by a crash, ends with the very bits of one that was not."""

import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tuning import compressed, examples, settings

from trisect.errors import TrisectError
from trisect.finetune import Stopped, TuneConfig, finetune
from trisect.finetune.adapters import attach
from trisect.finetune.training import RECORD, WARM_UP, Training, identify, rate_at, save_state, stop_requested

CONFIG = settings(epochs=4, lr=1e-2)
STEPS = 6
NAME = "gpt2"
"""Its dropout draws random numbers, so that a run that forgets them ends elsewhere."""


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def undisturbed() -> tuple[dict[str, torch.Tensor], list[float]]:
    tuned = finetune(compressed(NAME), examples(), CONFIG)
    assert tuned.receipt["steps"] == STEPS
    return weights(tuned.model), tuned.losses


class Crash(Exception):
    """The machine went away."""


def crash_at(step: int, path: Path, *, save_every: int) -> None:
    def progress(done: int, total: int) -> None:
        if done == step:
            raise Crash

    with pytest.raises(Crash):
        finetune(compressed(NAME), examples(), CONFIG, state=path, save_every=save_every, progress=progress)


@hypothesis_settings(max_examples=5, deadline=None)
@given(st.data())
def test_a_crash_at_any_step_leaves_no_trace(
    undisturbed: tuple[dict[str, torch.Tensor], list[float]],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("run") / "state.safetensors"
    save_every = data.draw(st.integers(1, 3), label="save every")
    crashes = sorted(data.draw(st.sets(st.integers(save_every, STEPS), min_size=1, max_size=2), label="at"))
    for step in crashes:
        crash_at(step, path, save_every=save_every)
    tuned = finetune(compressed(NAME), examples(), CONFIG, state=path)
    expected, losses = undisturbed
    assert tuned.losses == losses
    now = weights(tuned.model)
    assert all(torch.equal(now[name], value) for name, value in expected.items())
    reached = crashes[-1]
    assert tuned.receipt["resumed_at"] == (reached if reached == STEPS else reached // save_every * save_every)


@pytest.mark.parametrize("asked_after", [0, 1, 5, 7])
def test_ctrl_c_between_two_batches_is_a_step_that_never_began(
    asked_after: int, undisturbed: tuple[dict[str, torch.Tensor], list[float]], tmp_path: Path
) -> None:
    """`asked_after` counts batches; a step has two, so that some requests come in the middle of a step."""
    config, path = CONFIG, tmp_path / "state.safetensors"
    torch.manual_seed(config.seed)
    model = compressed(NAME)
    training = Training(attach(model, config), examples().items, config)
    answers = iter([False] * asked_after + [True])
    while training.take_step(lambda: next(answers)):
        pass
    assert training.step == asked_after // 2
    save_state(path, training, identify(compressed(NAME), examples(), config), seconds=1.0)
    tuned = finetune(compressed(NAME), examples(), config, state=path)
    expected, losses = undisturbed
    assert tuned.losses == losses
    now = weights(tuned.model)
    assert all(torch.equal(now[name], value) for name, value in expected.items())


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, whatever the shell that started the tests thinks of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_tuning_with_a_state_to_resume(number: int, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"

    def progress(done: int, total: int) -> None:
        if done == 2:
            os.kill(os.getpid(), number)

    with pytest.raises(Stopped) as stopped:
        finetune(compressed(), examples(), CONFIG, state=path, progress=progress)
    assert (stopped.value.step, stopped.value.total, stopped.value.state) == (2, STEPS, path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    tuned = finetune(compressed(), examples(), CONFIG, state=path)
    assert tuned.receipt["resumed_at"] == 2


@pytest.mark.usefixtures("interruptible")
def test_the_second_ctrl_c_does_not_wait() -> None:
    with stop_requested() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stopped") / "state.safetensors"
    tuned = finetune(compressed(), examples(), settings(max_steps=1), state=path)
    assert tuned.receipt["steps"] == 1
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
    before = stopped_run.read_bytes()
    with pytest.raises(TrisectError) as error:
        finetune(compressed(), examples(), settings(max_steps=1, **changes), state=stopped_run)
    assert said in str(error.value)
    assert stopped_run.read_bytes() == before


def test_another_model_and_other_data_are_named(stopped_run: Path) -> None:
    with pytest.raises(TrisectError, match="data was '"):
        finetune(compressed(), examples(seed=6), settings(max_steps=1), state=stopped_run)
    with pytest.raises(TrisectError, match="model was '"):
        finetune(compressed("llama-mha"), examples(), settings(max_steps=1), state=stopped_run)


def test_the_state_is_plain_tensors_and_json(stopped_run: Path) -> None:
    with safe_open(stopped_run, framework="pt") as file:
        record = json.loads(file.metadata()[RECORD])
        kinds = {name.split("/")[0] for name in file.keys()}  # noqa: SIM118
    assert record["step"] == 1
    assert len(record["losses"]) == 1
    assert kinds == {"adapter", "optimizer"}


@pytest.mark.parametrize("damage", ["cut", "foreign", "tensor gone"])
def test_a_damaged_state_is_refused(damage: str, stopped_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    if damage == "cut":
        path.write_bytes(stopped_run.read_bytes()[:-100])
    elif damage == "foreign":
        save_file({"x": torch.ones(2)}, path)
    elif damage == "tensor gone":
        with safe_open(stopped_run, framework="pt") as file:
            metadata = file.metadata()
        tensors = load_file(stopped_run)
        tensors.pop(next(name for name in tensors if name.startswith("optimizer/exp_avg/")))
        save_file(tensors, path, metadata=metadata)
    with pytest.raises(TrisectError, match="cannot be resumed from"):
        finetune(compressed(), examples(), settings(max_steps=1), state=path)


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
