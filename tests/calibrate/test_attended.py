"""How attention answers to a change of W_q, W_k and W_v: derivatives against changed weights."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from damaged import a_metric, damaged_streams
from torch import Tensor

from tiny_models import PLAIN, tiny, tokens
from trisect.calibrate import TwoStreams, attended
from trisect.calibrate.attended import LinearisedAttention, every_window
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.models.view import LayerView
from trisect.pipeline.run import compress
from trisect.records.parts import INNER, OV, QK

STEP = 1e-3
"""To both sides: third derivatives leave an error of STEP^2, norms that round queries to float32 one of 1e-7 / STEP."""
SHARED = [name for name in PLAIN if "wrapper" not in name and "mqa-shared" not in name]


def streams_of(name: str, *, batch_size: int | None = None) -> tuple[TwoStreams, LayerView]:
    """In front of the last layer that has heads to narrow."""
    streams, view = damaged_streams(name, lambda view: {"qk", "ov"} <= set(view.components), batch_size=batch_size)
    assert {"qk", "ov"} <= set(view.components)
    return streams, view


def outputs(streams: TwoStreams, view: LayerView) -> Tensor:
    """What W_o makes of the heads on the narrow stream, in the part's unit, over the windows that are not held out."""
    seen: list[Tensor] = []
    part = view.part("ov")
    assert isinstance(part, OV)
    attention = view.attention

    def tap(tap: str, *observed: Tensor) -> None:
        if tap == "a":
            seen.append(observed[0].flatten(2) @ part.W_o.flatten(0, 1))

    attention.tap = tap
    with torch.no_grad():
        for number, states in enumerate(streams.narrow.hidden):
            if not streams.windows.held(number) and not of_beginnings(streams, number):
                call = streams.narrow.call(number, view.index)
                view.layer(states, *call.args, **call.kwargs)
    attention.tap = None
    return torch.cat([out.flatten(0, 1) for out in seen])


def of_beginnings(streams: TwoStreams, number: int) -> bool:
    return bool((streams.windows.numbers[number] >= streams.windows.whole).all())


def fits(streams: TwoStreams) -> list[int]:
    numbers = range(len(streams.narrow.hidden))
    return [n for n in numbers if not streams.windows.held(n) and not of_beginnings(streams, n)]


def moved(qk: QK, ov: OV, v: Tensor) -> tuple[QK, OV]:
    maps, at = [], 0
    for W in (qk.W_q, qk.W_k, ov.W_v):
        size = len(W) * W.shape[-1]
        maps.append(W + v[:, at : at + size].unflatten(-1, (len(W), -1)).transpose(0, 1))
        at += size
    return replace(qk, W_q=maps[0], W_k=maps[1]), replace(ov, W_v=maps[2])


@pytest.mark.parametrize("name", SHARED)
def test_the_regression_on_directions_is_that_on_what_they_change(name: str) -> None:
    """Whatever a family does between its maps and its heads' output: norms, rotation, windows, caps, sinks, biases."""
    streams, view = streams_of(name)
    qk, ov = view.part("qk"), view.part("ov")
    assert isinstance(qk, QK)
    assert isinstance(ov, OV)
    if view.shared_output:
        pytest.skip("heads share one output projection, which a3+ refuses")
    metric = a_metric(ov.W_o.shape[-1])
    found = streams.attention_to_first_order(view, metric=metric)
    vectors, before = found[f"{INNER}_vectors"].double(), outputs(streams, view)
    changes = []
    for v in vectors:
        size, sides = STEP / v.abs().max(), []
        for sign in (1, -1):
            with view.trial():
                for part in moved(qk, ov, sign * size * v):
                    view.write(part)
                sides.append(outputs(streams, view))
        changes.append((sides[0] - sides[1]) / (2 * size) @ metric)
    w = torch.cat([streams._weight(view, n, "a").flatten() for n in fits(streams)])
    targets = [streams._target(view, n, streams.narrow.hidden[n], [])("a").flatten(0, 1) for n in fits(streams)]
    lacks, J = (torch.cat(targets) - before) @ metric, torch.stack(changes)
    gram = torch.einsum("knd,lnd,n->kl", J, J, w) / len(w)
    # Directions are stored in float32, and rates of rotation are.
    torch.testing.assert_close(found[f"{INNER}_gram"], gram, rtol=2e-3, atol=2e-4 * gram.diagonal().max().item())
    cross, energy = torch.einsum("knd,nd,n->k", J, lacks, w) / len(w), (lacks.square().sum(dim=-1) * w).mean()
    torch.testing.assert_close(found[f"{INNER}_energy"], energy, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(
        found[f"{INNER}_target"].squeeze(-1), cross, rtol=2e-3, atol=2e-4 * cross.abs().max().item()
    )


@pytest.mark.parametrize("queries", [3, 5, 64])
def test_neither_batches_nor_blocks_of_queries_change_anything(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    streams, view = streams_of("llama-gqa")
    whole = streams.attention_to_first_order(view)
    monkeypatch.setattr(attended, "QUERIES", {"cpu": queries})
    monkeypatch.setattr(attended, "SCORES", {"cpu": 1})
    streams, view = streams_of("llama-gqa", batch_size=1)
    found = streams.attention_to_first_order(view)
    for name, value in whole.items():
        # Directions are stored in float32.
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5 * value.abs().max().item())


def test_windows_that_are_not_kept_still_say_what_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first direction is of b and M alone, which are sums over all windows."""
    streams, view = streams_of("llama-gqa")
    whole = streams.attention_to_first_order(view)
    streams.every_window = 2
    thinned = streams.attention_to_first_order(view)
    first = f"{INNER}_vectors"
    torch.testing.assert_close(thinned[first][0], whole[first][0], rtol=1e-5, atol=1e-7)
    assert not torch.allclose(thinned[first][1], whole[first][1], rtol=1e-3)


@pytest.mark.parametrize(("count", "length"), [(1, 1), (84, 256), (256, 2048), (300, 1000), (16, 1024)])
def test_kept_windows_have_enough_tokens(count: int, length: int) -> None:
    every = every_window(count, length)
    assert every == 1 or attended.ROWS <= count * length / every < 2 * attended.ROWS


def test_columns_weigh_what_the_output_answers_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """b of M, drawn with 16 seeds, beside the squares of all derivatives: draws scatter by a fifth, their sum by 2%."""
    streams, view = streams_of("llama-gqa")
    own: list[LinearisedAttention] = []
    monkeypatch.setattr(LinearisedAttention, "moments", lambda self: own.append(self) or {})
    for seed in range(16):

        def generator(self: Any, window: int, seed: int = seed) -> torch.Generator:
            return torch.Generator().manual_seed(1000 * seed + window)

        monkeypatch.setattr(LinearisedAttention, "generator", generator)
        streams.attention_to_first_order(view)
    drawn = torch.stack([one.sums["outputs"] / one.sums["noisy"] for one in own]).mean(dim=0)
    exact, seen = torch.zeros_like(drawn), 0
    for at in (at for at in own[0].batches if not at.held):
        b, t, D = at.x.shape
        seen += b * t
        for token in range(t):
            for channel in range(D):
                asked = torch.zeros_like(at.x)
                asked[:, token, channel] = 1.0  # windows do not see each other
                exact += own[0].pull([asked], at)[0].square().sum(dim=(0, 1))
    assert seen == own[0].sums["noisy"]
    torch.testing.assert_close(drawn.sum(), exact.sum() / seen, rtol=0.06, atol=0.0)
    torch.testing.assert_close(drawn, exact / seen, rtol=0.4, atol=0.0)


def test_where_nothing_comes_behind_it_an_output_map_is_fitted_to_all_tokens() -> None:
    ids, states = tokens_from_tensor(tokens(96, 48, seed=5)), []
    for refine in (False, True):
        model = tiny("llama-gqa")
        settings = {"method": "a3+", "align": None, "parts": ("ov",), "refine": refine}
        compress(model, CompressConfig(ratio=0.25, **settings), tokens=ids)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("every", [2, 4, 8])
def test_however_few_windows_are_kept_one_of_them_judges(every: int) -> None:
    streams, view = streams_of("llama-gqa")
    streams.every_window = every
    found = streams.attention_to_first_order(view)
    assert found[f"{INNER}_gram_held"].diagonal().min() > 0


def test_refitted_heads_bring_a_narrow_model_closer_on_fresh_tokens() -> None:
    calibration, fresh, dense = tokens_from_tensor(tokens(96, 48, seed=5)), tokens(16, 48, seed=9), tiny("llama-gqa")
    gaps = {}
    for refine in (False, True):
        model = tiny("llama-gqa")
        settings = {"method": "a3+", "align": None, "parts": ("qk", "ov"), "refine": refine}
        compress(model, CompressConfig(ratio=0.25, **settings), tokens=calibration)
        with torch.no_grad():
            gaps[refine] = (model(fresh).logits - dense(fresh).logits).square().sum().item()
    assert gaps[True] < 0.97 * gaps[False]


def test_a_method_that_refits_nothing_refuses_to_refine() -> None:
    config = CompressConfig(ratio=0.25, method="a3", refine=True)
    with pytest.raises(TrisectError, match="--refine goes on where a3\\+ ends.*--method a3\\+"):
        compress(tiny("llama-gqa"), config, tokens=tokens_from_tensor(tokens(8, 12)))
