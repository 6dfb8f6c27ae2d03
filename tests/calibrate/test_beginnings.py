"""Short windows that stand for the first tokens of texts: slices of the others, counted as windows' first tokens are.

References: the stock model on these windows alone; sums over single tokens.
"""

import pytest
import torch
from torch import Tensor

from tiny_models import tiny, tokens
from trisect.calibrate import TwoStreams, replay
from trisect.calibrate.replay import BEGINNING, HELD_SHARE, beginnings_of, in_batches
from trisect.models import layer_views
from trisect.models.view import LayerView
from trisect.support import distributed

FEW = 12
"""Beginnings in these tests, of 8 windows of 24 tokens."""


@pytest.fixture
def few_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "BEGINNINGS", (1, FEW))
    monkeypatch.setattr(replay, "BEGINNING_SHARE", 1)


def test_beginnings_are_stretches_of_the_windows_the_same_for_the_same_seed() -> None:
    ids = torch.arange(64 * 64).reshape(64, 64)
    found = beginnings_of(ids, seed=3)
    assert found is not None
    assert found.shape == (64 * 64 // replay.BEGINNING_SHARE // BEGINNING, BEGINNING)
    assert torch.equal(found - found[:, :1], torch.arange(BEGINNING).expand_as(found))
    assert (found[:, 0] // 64 == found[:, -1] // 64).all()  # within one window
    assert len(found[:, 0].unique()) > len(ids) // 2
    assert torch.equal(found, beginnings_of(ids, seed=3))
    assert not torch.equal(found, beginnings_of(ids, seed=4))


def test_there_are_none_where_every_text_begins_alike_or_tokens_are_few() -> None:
    ids = torch.arange(64 * 64).reshape(64, 64)
    assert beginnings_of(ids.index_fill(1, torch.tensor([0]), 1), seed=0) is None
    assert beginnings_of(ids[:8], seed=0) is None
    assert beginnings_of(ids.reshape(-1, 4), seed=0) is None


@pytest.mark.parametrize("count", [1, 3])
def test_every_beginning_is_run_by_one_process_and_some_are_held_out(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, short = torch.arange(29 * 8).reshape(29, 8), torch.arange(FEW * BEGINNING).reshape(FEW, BEGINNING)
    monkeypatch.setattr(distributed, "world_size", lambda: count)
    seen: dict[bool, list[int]] = {False: [], True: []}
    for rank in range(count):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        mine = in_batches(ids, batch_size=2, hold_out=True, split=True, beginnings=short)
        for number, (batch, numbers) in enumerate(zip(mine.batches, mine.numbers, strict=True)):
            if int(numbers[0]) < len(ids):
                assert mine.weight(number) == 1.0
            else:
                assert torch.equal(batch, short[numbers - len(ids)])
                assert mine.weight(number) == 1.0  # fewer than windows
                seen[mine.held(number)].extend((numbers - len(ids)).tolist())
    edge = FEW - FEW // HELD_SHARE
    assert sorted(seen[False]) == list(range(edge))
    assert sorted(seen[True]) == list(range(edge, FEW))


@pytest.mark.parametrize("name", ["llama-gqa", "mpt", "gpt2", "qwen3"])
@pytest.mark.usefixtures("few_are_enough")
def test_beginnings_count_as_much_as_the_windows_first_tokens(name: str) -> None:
    model, ids = tiny(name).double(), tokens(8, 24)
    views = layer_views(model, own=True)
    streams = TwoStreams(model, views, ids, batch_size=3, seed=0)
    windows, view = streams.windows, views[0]
    assert sum(len(batch) for batch in windows.batches) == len(ids) + FEW
    assert {windows.weight(n) for n in range(len(windows.batches))} == {1.0, len(ids) / FEW}
    streams.begin(view)
    found = streams.statistics(view, "mlp", frozenset({"mlp_gram", "mlp_target", "mlp_energy", "mlp_tokens"}))
    gram, count = torch.zeros_like(found["mlp_gram"]), 0
    for number, batch in enumerate(windows.batches):
        if not windows.held(number):
            rows, stream = alone(model, view, batch)
            gram += windows.weight(number) * (rows.mT / stream.square().sum(dim=-1)) @ rows
            count += len(rows)
    torch.testing.assert_close(found["mlp_gram"], gram / count, rtol=1e-9, atol=1e-12)


def alone(model: torch.nn.Module, view: LayerView, batch: Tensor) -> tuple[Tensor, Tensor]:
    """What the first layer's down projection reads, and the residual stream that its MLP adds to."""
    seen: dict[str, Tensor] = {}
    handles = [
        view.module("down").register_forward_pre_hook(lambda m, args: seen.update(rows=args[0])),
        view.layer.register_forward_pre_hook(
            lambda m, args, kwargs: seen.update(stream=args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        ),
        view.mixer.register_forward_hook(
            lambda m, args, out: seen.update(mixed=out[0] if isinstance(out, tuple) else out)
        ),
    ]
    with torch.no_grad():
        model(batch)
    for handle in handles:
        handle.remove()
    bias = getattr(view.module("o"), "bias", None)
    stream = seen["stream"] + seen["mixed"] - (0 if bias is None else bias)
    return seen["rows"].flatten(0, -2), stream.flatten(0, -2)
