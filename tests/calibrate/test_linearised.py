"""How MLPs answer to a change of W_up and W_gate: derivatives against changed weights."""

from dataclasses import replace

import pytest
import torch
from damaged import a_metric, damaged_streams
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tiny_models import tiny, tokens
from trisect.calibrate import TwoStreams, linearised
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.models.view import LayerView
from trisect.pipeline.run import compress
from trisect.records.parts import INNER, MLP, Experts

STEP = 1e-5
"""Second derivatives leave an error of this size, rounding of float64 one of 1e-11 / STEP."""


def streams_of(name: str) -> tuple[TwoStreams, LayerView]:
    """In front of the last layer, with experts if any has."""
    return damaged_streams(name, lambda view: view.experts is not None)


def outputs(streams: TwoStreams, view: LayerView) -> Tensor:
    """What the MLP puts out on the narrow stream, over the tokens that are not held out."""
    kept: list[Tensor] = []
    assert view.mlp_output is not None
    handle = view.mlp_output.register_forward_hook(
        lambda module, args, out: kept.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        for number, states in enumerate(streams.narrow.hidden):
            if not streams.windows.held(number):
                call = streams.narrow.call(number, view.index)
                view.layer(states, *call.args, **call.kwargs)
    handle.remove()
    return torch.cat([out.flatten(0, -2) for out in kept])


def moved(part: MLP, v: Tensor) -> MLP:
    up, *gate = v.split(part.width, dim=-1)
    return replace(part, W_up=part.W_up + up, **({} if part.W_gate is None else {"W_gate": part.W_gate + gate[0]}))


def weights(streams: TwoStreams, view: LayerView) -> Tensor:
    fits = [n for n in range(len(streams.narrow.hidden)) if not streams.windows.held(n)]
    return torch.cat([streams._weight(view, n, "down").flatten() for n in fits])


def missing(streams: TwoStreams, view: LayerView) -> Tensor:
    """What the MLP would have to put out more, so that the layer's output is the dense model's."""
    gaps = []
    with torch.no_grad():
        for number, states in enumerate(streams.narrow.hidden):
            if not streams.windows.held(number):
                gap = streams.dense.hidden[number] - streams.narrow.through(view, number, states)
                gaps.append(gap.flatten(0, -2) / getattr(view.layer, "residual_multiplier", 1.0))
    return torch.cat(gaps)


def metric_of(view: LayerView) -> Tensor:
    part = view.part("mlp")
    return a_metric((part.routed[0] if isinstance(part, Experts) else part).W_down.shape[-1])


def thinned(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """Let rows of one token in `every` be enough, of the 96 that the streams have."""
    monkeypatch.setattr(linearised, "ROWS", 96 // every)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize(
    ("name", "every"), [("llama-gqa", 1), ("llama-gqa", 4), ("phi3", 1), ("gpt2", 2), ("opt", 1), ("granite", 1)]
)
def test_the_regression_on_directions_is_that_on_what_they_change(
    name: str, every: int, weighed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with a metric, on what it makes of the changed outputs (math.md F-9)."""
    thinned(monkeypatch, every)
    streams, view = streams_of(name)
    metric = metric_of(view) if weighed else None
    found = streams.statistics(view, "refit-up", frozenset({INNER}), metric=metric)
    vectors, part = found[f"{INNER}_vectors"].double(), view.part("mlp")
    assert isinstance(part, MLP)
    before, changes = outputs(streams, view), []
    for v in vectors:
        size = STEP / v.abs().max()
        with view.trial():
            view.write(moved(part, size * v))
            changes.append((outputs(streams, view) - before) / size)
    J, w, lacks = torch.stack(changes), weights(streams, view), missing(streams, view)
    if metric is not None:
        J, lacks = J @ metric, lacks @ metric
    some = slice(None, None, every)
    gram = torch.einsum("knd,lnd,n->kl", J[:, some], J[:, some], w[some]) / len(w[some])
    # Directions are stored in float32.
    torch.testing.assert_close(found[f"{INNER}_gram"], gram, rtol=2e-3, atol=2e-4 * gram.diagonal().max().item())
    cross, energy = torch.einsum("knd,nd,n->k", J, lacks, w) / len(w), (lacks.square().sum(dim=-1) * w).mean()
    torch.testing.assert_close(found[f"{INNER}_energy"], energy, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(
        found[f"{INNER}_target"].squeeze(-1), cross, rtol=2e-3, atol=2e-4 * cross.abs().max().item()
    )


@pytest.mark.parametrize(("name", "every"), [("qwen3_moe", 1), ("qwen2_moe", 2), ("gpt_oss", 1), ("llama4", 1)])
def test_experts_answer_for_the_tokens_they_get_with_the_weight_they_have(
    name: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    thinned(monkeypatch, every)
    streams, view = streams_of(name)
    metric = metric_of(view)
    found = streams.statistics(view, "refit-up", frozenset({INNER}), metric=metric)
    part, before, w = view.part("mlp"), outputs(streams, view), weights(streams, view)
    assert isinstance(part, Experts)
    names = ["expert0", "expert1", *(["shared"] if part.shared is not None else [])]
    for expert in names:
        v = found[f"{expert}.{INNER}_vectors"].double()[0]
        mlp = part.shared if expert == "shared" else part.routed[int(expert[-1])]
        assert mlp is not None
        size = STEP / v.abs().max()
        changed = moved(mlp, size * v)
        routed = tuple(changed if one is mlp else one for one in part.routed)
        with view.trial():
            view.write(replace(part, routed=routed, shared=changed if expert == "shared" else part.shared))
            J = (outputs(streams, view) - before) / size @ metric
        each = (J.square().sum(dim=-1) * w)[::every]
        seen = found[f"{expert}.{INNER}_tokens"].item() if every == 1 else int((each > 0).sum())
        energy = each.sum() / seen
        torch.testing.assert_close(found[f"{expert}.{INNER}_gram"][0, 0], energy, rtol=2e-3, atol=0.0)


def test_refitted_neurons_bring_a_narrow_model_closer_on_fresh_tokens() -> None:
    calibration, fresh, dense = tokens_from_tensor(tokens(96, 48, seed=5)), tokens(16, 48, seed=9), tiny("llama-gqa")
    gaps = {}
    for without in ((), ("refit-up",)):
        model = tiny("llama-gqa")
        config = CompressConfig(ratio=0.25, method="a3+", align=None, parts=("mlp",), without=without)
        compress(model, config, tokens=calibration)
        with torch.no_grad():
            gaps[without] = (model(fresh).logits - dense(fresh).logits).square().sum().item()
    assert gaps[()] < 0.97 * gaps[("refit-up",)]


@given(n=st.integers(1, 4000), t=st.sampled_from([1, 3, 12, 100, 256, 2048]))
def test_rows_are_thinned_to_no_less_than_enough_and_evenly_in_every_window(n: int, t: int) -> None:
    every = linearised.every_token(torch.empty(n, t, dtype=torch.bool))
    assert t % every == 0
    assert every == 1 or n * t // every >= linearised.ROWS


def test_too_few_tokens_leave_the_input_maps_as_they_are() -> None:
    ids = tokens_from_tensor(tokens(4, 16))
    models = {}
    for without in ((), ("refit-up",)):
        models[without] = tiny("llama-gqa")
        config = CompressConfig(ratio=0.25, method="a3+", align=None, without=without)
        compress(models[without], config, tokens=ids)
    states = [model.state_dict() for model in models.values()]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
