"""Short prompts that are replayed give what the model says to each, whatever was read before them.

There is no GPU here: a recording of every operation on tensors stands in for a CUDA graph. Like one it has numbers of
the host baked in, and writes its results where they were when it was made.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from narrow_models import narrow
from tiny_models import PLAIN, left_padded, tokens
from tolerances import assert_same_text
from trisect.decode import Decoder
from trisect.decode.decoder import WORK, likeliest, recorded_length
from trisect.kernels import using

NEW = 6
FAMILIES = [name for name in PLAIN if not name.startswith("mpt")]  # MPT makes its bias of the host's numbers


class Tape(TorchDispatchMode):
    """Operations in order; `replay` runs them again on the memory they ran on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a graph cannot ask the device")
        self.seen.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.seen:
            inputs = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in inputs:
                    old.copy_(new)

    def pool(self) -> None:
        """Graphs share memory through this; a tape needs none."""


def taped(step: Callable[[], None], *, rewind: Callable[[], None], pool: Any = None) -> Tape:
    step()
    rewind()
    with Tape() as tape:
        step()
    rewind()  # capturing runs nothing
    return tape


def recording(model: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Decoder:
    """A Decoder that records as on a GPU."""
    monkeypatch.setattr("trisect.decode.decoder.record_graph", taped)
    decoder = Decoder(model, **settings)
    decoder._records = decoder._records_prompts = True
    return decoder


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 100, 1000, 1024, 1025, 4097])
def test_a_recorded_length_is_the_same_or_less_than_an_eighth_longer(tokens: int) -> None:
    padded = recorded_length(tokens)
    assert tokens <= padded < tokens * 1.125
    assert recorded_length(padded) == padded


def test_each_octave_has_few_recorded_lengths() -> None:
    assert len({recorded_length(tokens) for tokens in range(1025, 2049)}) == 8


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_replayed_prompts_go_on_as_fresh_ones(name: str, operators: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 18 tokens, and of 17 in the same graph; the cache has longer texts in it."""
    model, ids = narrow(name), tokens(3, 18)
    others = [tokens(3, 18).flip(dims=[0]), tokens(3, 18).roll(5, dims=1), tokens(3, 17).roll(3, dims=1)]
    with using(decode="kernel" if operators else "plain"):
        settings: Any = {"batch": 3, "max_length": 30, "bucket": None if operators else 4}
        expected = [Decoder(model, **settings).generate(prompt, NEW) for prompt in (ids, *others)]
        decoder = recording(model, monkeypatch, **settings)
        for prompt, text in zip((ids, *others), expected, strict=True):
            assert_same_text(model, decoder.generate(prompt, NEW), text, None)
    recorded = decoder._prompts[18]
    if name == "gpt2":  # looks for padding in the prompt, on the host
        assert recorded is None
    else:
        assert recorded is not None
        assert recorded.graph.replays == 3  # all but the first, the one of 17 tokens too


def test_padded_prompts_long_ones_and_mixtures_are_read_by_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = narrow("llama-gqa"), tokens(3, 8)
    decoder = recording(model, monkeypatch, batch=3, max_length=20, bucket=4)
    for _ in range(3):
        decoder.prefill(ids, left_padded(ids))
    assert not decoder._prompts
    decoder.batch = int(WORK)  # as if there were so many texts
    assert decoder._recorded_prompt(2) is None
    assert not decoder._prompts
    for name, mode, fit in (
        ("llama-gqa", "graphs", True),
        ("llama-gqa", "compile", False),
        ("mixtral", "graphs", False),
    ):
        monkeypatch.setattr("trisect.decode.decoder.resolved_mode", lambda *_, chosen=mode: chosen)
        assert Decoder(narrow(name), batch=3, max_length=20)._records_prompts == fit


def test_a_prompt_that_cannot_be_recorded_is_read_by_calls_and_steps_are_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = narrow("llama-gqa"), tokens(2, 8)
    expected = Decoder(model, batch=2, max_length=20, bucket=4).generate(ids, NEW)
    decoder = recording(model, monkeypatch, batch=2, max_length=20, bucket=4)

    def refuse_prompts(step: Callable[[], None], *, rewind: Callable[[], None], pool: Any = None) -> Tape:
        if decoder.cache.clock.prompt:
            raise RuntimeError("a prompt asked the device\nmore")
        return taped(step, rewind=rewind)

    monkeypatch.setattr("trisect.decode.decoder.record_graph", refuse_prompts)
    for _ in range(3):
        assert_same_text(model, decoder.generate(ids, NEW), expected, None)
    assert caplog.text.count("reading prompts without CUDA graphs, more slowly: a prompt asked the device") == 1
    assert decoder._graphs
    decoder._asked, decoder._records_prompts = "graphs", True
    with pytest.raises(RuntimeError, match="a prompt asked the device"):
        decoder.prefill(ids)


def test_what_is_drawn_behind_a_replayed_prompt_is_drawn_outside_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a resumed run of `sample`, whose first prompt is read by calls, would write other texts."""
    model, ids = narrow("llama-gqa"), tokens(2, 8)
    picked: list[Tensor] = []

    def pick(logits: Tensor) -> Tensor:
        picked.append(logits)
        return likeliest(logits)

    decoder = recording(model, monkeypatch, batch=2, max_length=20, bucket=4, pick=pick)
    for count in range(1, 4):
        decoder.prefill(ids)
        assert len(picked) == count
