"""Several processes share windows and solves: one model, the same bits in each, as from one process."""

import multiprocessing
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scale_runs import TOKENS, assert_same, config
from together import take_part

from tiny_models import tiny
from trisect.calibrate.replay import HELD_SHARE, in_batches
from trisect.errors import TrisectError
from trisect.pipeline.run import compress
from trisect.support import distributed

METHODS = ("a3", "a3+", "svd-llm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes wrote. They fork from one that has imported everything: torchrun is test_cli_scale's."""
    folder = tmp_path_factory.mktemp("together")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["together"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = [(rank, 2, port, folder, METHODS) for rank in range(2)]
    processes = [context.Process(target=take_part, args=place, daemon=True) for place in places]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=300)
    assert [process.exitcode for process in processes] == [0, 0]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_processes_make_the_model_that_one_makes(folder: Path, method: str) -> None:
    first, second = (load_file(folder / f"{method}-{rank}.safetensors") for rank in range(2))
    assert_same(first, second)
    model = compress(tiny("llama-gqa"), config(method), tokens=TOKENS).model
    other = tiny("llama-gqa")
    compress(other, config(method), tokens=TOKENS)
    other.load_state_dict(first)
    with torch.no_grad():
        found, expected = (m(input_ids=TOKENS.ids[:4]).logits for m in (other, model))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("hold_out", [False, True])
def test_every_window_is_run_by_exactly_one_process(
    count: int, hold_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(29 * 5).reshape(29, 5)
    monkeypatch.setattr(distributed, "world_size", lambda: count)
    fitting, held = [], []
    for rank in range(count):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        mine = in_batches(ids, batch_size=4, hold_out=hold_out, split=True)
        for number, (batch, numbers) in enumerate(zip(mine.batches, mine.numbers, strict=True)):
            assert torch.equal(batch, ids[numbers])
            (held if mine.held(number) else fitting).extend(numbers.tolist())
    edge = 29 - 29 // HELD_SHARE if hold_out else 29
    assert sorted(fitting) == list(range(edge))
    assert sorted(held) == list(range(edge, 29))


def test_too_few_windows_for_the_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    monkeypatch.setattr(distributed, "rank", lambda: 3)
    with pytest.raises(TrisectError, match="--samples 16"):
        in_batches(torch.zeros(12, 4), hold_out=True, split=True)
