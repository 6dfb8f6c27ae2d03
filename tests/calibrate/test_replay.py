"""The replay loop sees what the stock model computes, layer by layer, and nothing else.

References: the stock model's hidden states; brute-force moments of recorded activations.
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from tiny_models import CONFIGS, tiny, tokens
from tolerances import LAYER_STEPS, assert_same_but_for_rounding, steps_of
from trisect.calibrate import READINGS, Stream, collect
from trisect.errors import TrisectError
from trisect.models import layer_views


@pytest.mark.parametrize("name", CONFIGS)
def test_replayed_hidden_states_equal_the_stock_ones(name: str) -> None:
    model, ids = tiny(name), tokens(5, 20)
    seen: dict[int, list[Tensor]] = {}
    views = layer_views(model, own=True)
    handles = [
        view.layer.register_forward_hook(
            lambda module, args, output, index=view.index: seen.setdefault(index, []).append(
                output[0] if isinstance(output, tuple) else output
            )
        )
        for view in views
    ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    stream = Stream.embed(model, views, ids.split(2))  # the last batch is smaller
    for view in views:
        stream.advance(view)
        here, steps = torch.cat(list(stream.hidden)), LAYER_STEPS * (1 + view.index)
        assert_same_but_for_rounding(here, seen[view.index][0], steps=steps)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gpt2", "helium"])
def test_moments_equal_brute_force_sums_over_tokens(name: str) -> None:
    model, ids = tiny(name), tokens(3, 12)
    view = layer_views(model, own=True)[0]
    heard: dict[str, Tensor] = {}
    view.attention.tap = lambda tap, x, *rest: heard.__setitem__(tap, x.double())
    down: list[Tensor] = []
    handle = view.module("down").register_forward_pre_hook(lambda m, args: down.append(args[0].double()))
    with torch.no_grad():
        model(ids)
    view.attention.tap = None
    handle.remove()

    _, moments = next(collect(model, ids, lambda layer: frozenset(READINGS), batch_size=2))
    n = ids.numel()
    assert_same = partial(assert_same_but_for_rounding, steps=LAYER_STEPS, dtype=torch.float32)
    for name_, tap in {"q": "q", "k": "k", "v": "v", "a": "a"}.items():
        x = heard[tap]
        expected = torch.einsum("bthd,bthe->hde", x, x) / n
        assert_same(moments[name_], expected)
    flat = heard["a"].flatten(2)
    assert_same(moments["a_gram"], torch.einsum("bti,btj->ij", flat, flat) / n)
    assert_same(moments["mlp"], down[0].square().mean(dim=(0, 1)))
    if name == "qwen3":
        u = heard["q_raw"].square()
        assert_same(moments["q_squares"], torch.einsum("bthd,bthe->hde", u, u) / n)


def test_moments_do_not_depend_on_the_batch_size() -> None:
    model, ids = tiny("llama-gqa"), tokens(6, 16)
    reads = frozenset({"q", "a", "mlp"})
    runs = [list(collect(model, ids, lambda layer: reads, batch_size=size)) for size in (1, 4, 6)]
    for others in runs[1:]:
        for (_, a), (_, b) in zip(runs[0], others, strict=True):
            for name in reads:
                assert_same_but_for_rounding(a[name], b[name], steps=steps_of(model), dtype=torch.float32)


def test_moments_of_a_bf16_model_are_float64() -> None:
    model, ids = tiny("llama-gqa", dtype=torch.bfloat16), tokens(2, 16)
    _, moments = next(collect(model, ids, lambda layer: frozenset({"q", "mlp"})))
    assert {tensor.dtype for tensor in moments.values()} == {torch.float64}


def test_nothing_stays_attached_when_calibration_fails_half_way() -> None:
    model, ids = tiny("llama-gqa"), tokens(2, 16)
    views = layer_views(model, own=True)
    with torch.no_grad():
        views[1].module("down").weight[0, 0] = float("nan")
    with pytest.raises(TrisectError, match=r"after layer 1 hold NaN"):
        list(collect(model, ids, lambda layer: frozenset({"q", "mlp"})))
    assert all(view.attention.tap is None for view in views)
    assert all(not view.module("down")._forward_pre_hooks for view in views)
    assert all("forward" not in vars(view.layer) for view in views)
