"""Layers that lack a component: everything counts what is there, passes over what is not, and says so once.

References: parameters of the modules counted one by one; the stock model's logits; the model's own cache.
"""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from narrow_models import narrow
from tiny_models import logits, tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.decode import Decoder
from trisect.errors import TrisectError
from trisect.models import layer_views, left_whole, shape_of
from trisect.pipeline.run import compress
from trisect.plan import budget_of
from trisect.plan.budget import matrix_parameters
from trisect.records.parts import COMPONENTS

NAME, BARE, ATTENDS = "lfm2", (0, 2), 1
"""Convolutions in layers 0 and 2, attention in layer 1, an MLP in each."""


def run(**settings: Any) -> Any:
    config = CompressConfig(**{"ratio": 0.25, "align": None, "qk_norm_tolerance": 1.0, **settings})
    return compress(tiny(NAME), config, tokens=tokens_from_tensor(tokens(8, 40)))


def test_a_shape_counts_what_is_there() -> None:
    model = tiny(NAME)
    shape, layer = shape_of(model), model.model.layers[0]
    bare = shape.layers[0]
    assert bare.components == ("mlp",)
    assert (bare.heads, bare.kv_heads, bare.qk, bare.pairs, bare.vo) == (0, 0, 0, 0, 0)
    assert shape.layers[ATTENDS].components == COMPONENTS
    assert bare.whole == sum(p.numel() for p in layer.conv.parameters() if p.ndim > 1)
    assert shape.layers[ATTENDS].whole == 0
    assert budget_of(shape).parameters == sum(p.numel() for p in model.parameters())
    attention = model.model.layers[ATTENDS].self_attn
    counted = matrix_parameters(shape.layers[ATTENDS], "qk") + matrix_parameters(shape.layers[ATTENDS], "ov")
    assert counted == sum(p.numel() for p in attention.parameters() if p.ndim > 1)
    assert matrix_parameters(bare, "qk") == matrix_parameters(bare, "ov") == 0


@pytest.mark.parametrize("method", ["a3", "a3+", "wanda", "svd-llm", "wanda-sparse"])
def test_every_kind_of_method_passes_over_it(method: str) -> None:
    parts = ("qk", "mlp") if method == "wanda" else COMPONENTS
    done = run(method=method, parts=parts)
    steps = {(entry["layer"], entry["component"]) for entry in done.losses}
    assert {layer for layer, name in steps if name not in ("mlp", "gate", "up", "down")} == {ATTENDS}
    assert {layer for layer, _ in steps} == {*BARE, ATTENDS}
    conv = tiny(NAME).model.layers[0].conv.state_dict()
    assert all(value.equal(conv[key]) for key, value in done.model.model.layers[0].conv.state_dict().items())
    assert logits(done.model, tokens()).isfinite().all()


def test_measured_curves_and_the_balanced_plan_pass_over_it() -> None:
    done = run(method="a3", allocate="balanced", align=8)
    assert all(done.plan.layers[layer].qk == done.plan.layers[layer].vo == 0 for layer in BARE)


def test_the_run_the_receipt_and_the_summary_say_once_what_was_left_whole(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        done = run(method="a3")
    said = "qk, ov of layers 0, 2: no attention"
    assert [said in record.getMessage() for record in caplog.records].count(True) == 1
    assert done.receipt["left_whole"] == [said]
    assert left_whole(layer_views(tiny("llama-gqa"))) == []


def test_nothing_to_narrow_is_refused_before_the_work() -> None:
    with pytest.raises(TrisectError, match=r"None of the layers has ov.*--parts"):
        run(method="a3", parts=("ov",), layers=(0,))


def test_a_width_where_nothing_is_is_refused() -> None:
    view = layer_views(tiny(NAME))[0]
    with pytest.raises(TrisectError, match="Layer 0 has no qk to narrow: no attention"):
        view.resize(replace(view.shape(), qk=8))
    with pytest.raises(TrisectError, match="Layer 0 has no ov"):
        view.part("ov")


def test_a_trial_of_a_layer_without_attention_leaves_no_trace() -> None:
    model, ids = tiny(NAME), tokens()
    view, before = layer_views(model)[0], logits(model, ids)
    with view.trial():
        view.resize(replace(view.shape(), mlp=8))
        for parameter in view.module("down").parameters():
            torch.nn.init.ones_(parameter)
        assert not logits(model, ids).allclose(before)
    assert logits(model, ids).equal(before)


def test_the_decoder_refuses_layers_whose_state_its_cache_cannot_hold() -> None:
    with pytest.raises(TrisectError, match=r"Layer 0 has no attention.*model\.generate"):
        Decoder(narrow(NAME), batch=1, max_length=8)
