"""Several processes share windows and solves: one model, the same bits in each, as from one process."""

import json
import multiprocessing
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scale_runs import TOKENS, assert_same, config
from together import EXPERT, take_part

from tiny_models import tiny
from trisect.calibrate.replay import HELD_SHARE, in_batches
from trisect.errors import TrisectError
from trisect.pipeline.run import compress
from trisect.support import distributed

MIXTURE = "qwen2_moe"  # with a shared expert
CASES = [*(("llama-gqa", method) for method in ("a3", "a3+", "svd-llm")), (MIXTURE, "a3"), (MIXTURE, "a3+")]


def written_by(processes: int, folder: Path, cases: list[tuple[str, str]]) -> Path:
    """What processes wrote. They fork from one that has imported everything: torchrun is test_cli_scale's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["together"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    places = [(rank, processes, port, folder, cases) for rank in range(processes)]
    running = [context.Process(target=take_part, args=place, daemon=True) for place in places]
    for process in running:
        process.start()
    for process in running:
        process.join(timeout=300)
    assert [process.exitcode for process in running] == [0] * processes
    return folder


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by(2, tmp_path_factory.mktemp("two"), CASES)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by(4, tmp_path_factory.mktemp("four"), [(MIXTURE, "a3+")])


def check_all_made(name: str, method: str, processes: int, folder: Path) -> None:
    """Every process has the same bits, and its model puts out what that of one process does."""
    first, *others = (load_file(folder / f"{name}-{method}-{rank}.safetensors") for rank in range(processes))
    for other in others:
        assert_same(first, other)
    model = compress(tiny(name), config(method), tokens=TOKENS).model
    other = tiny(name)
    compress(other, config(method), tokens=TOKENS)
    other.load_state_dict(first)
    with torch.no_grad():
        found, expected = (m(input_ids=TOKENS.ids[:4]).logits for m in (other, model))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "method"), CASES)
def test_two_processes_make_the_model_that_one_makes(of_two: Path, model: str, method: str) -> None:
    check_all_made(model, method, 2, of_two)


@pytest.mark.slow
def test_four_processes_make_the_mixture_that_one_makes(of_four: Path) -> None:
    check_all_made(MIXTURE, "a3+", 4, of_four)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_an_experts_matrices_are_in_one_process_alone(processes: int, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue({2: "of_two", 4: "of_four"}[processes])
    each = [json.loads((folder / f"{MIXTURE}-a3+-{rank}.json").read_text()) for rank in range(processes)]
    assert all(each)
    names = [name for matrices in each for name in matrices]
    assert len(names) == len(set(names))
    kinds = {"mlp_gram", "mlp_target", "inner_gram", "inner_vectors"}
    experts = [*(f"expert{number}" for number in range(4)), "shared"]
    assert {f"{expert}.{kind}" for expert in experts for kind in kinds} <= set(names)
    assert all(name.startswith(EXPERT) for name in names)


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
