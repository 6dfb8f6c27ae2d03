"""The norm in front of the head is scaled by least squares: against hooks on whole models."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_models import FAMILIES, tiny, tokens
from trisect.calibrate import TwoStreams
from trisect.calibrate.streams import last_norm, scale_last_norm
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.models import layer_views
from trisect.pipeline.run import Compressed, compress

NO_LAST_NORM = "opt-norm-after"
IDS = tokens(6, 20, seed=5)


def cut(name: str, **more: Any) -> Compressed:
    settings: dict[str, Any] = {"ratio": 0.3, "method": "a3+", "align": None}
    return compress(tiny(name), CompressConfig(**{**settings, **more}), tokens=tokens_from_tensor(IDS))


def seen_by_the_head(model: Any) -> Tensor:
    heard: list[Tensor] = []
    norm = last_norm(model, layer_views(model)[0].family)
    handle = norm.register_forward_hook(lambda module, args, output: heard.append(output.double()))
    with torch.no_grad():
        model(input_ids=IDS)
    handle.remove()
    return heard[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_factor_is_the_least_squares_one_and_the_rest_of_the_model_is_left_alone(name: str) -> None:
    plain, scaled = cut(name, without=("tail",)), cut(name)
    x, y = seen_by_the_head(plain.model), seen_by_the_head(tiny(name))
    expected = torch.linalg.lstsq(x.reshape(-1, 1), y.reshape(-1, 1)).solution.item()
    assert scaled.receipt["last_norm_scale"] == pytest.approx(expected, rel=1e-5)
    assert "last_norm_scale" not in plain.receipt
    torch.testing.assert_close(seen_by_the_head(scaled.model), expected * x, rtol=1e-4, atol=1e-6)
    norm = {id(parameter) for parameter in last_norm(scaled.model, layer_views(scaled.model)[0].family).parameters()}
    mine, others = dict(scaled.model.named_parameters()), dict(plain.model.named_parameters())
    for key, parameter in mine.items():
        assert parameter.equal(others[key]) == (id(parameter) not in norm), key


def test_nothing_is_scaled_where_nothing_is_cut() -> None:
    model = tiny("llama-gqa")
    streams = TwoStreams(model, layer_views(model), IDS, batch_size=None, seed=0)
    assert scale_last_norm(model.model.norm, streams) == 1.0
    assert model.model.norm.weight.equal(tiny("llama-gqa").model.norm.weight)


def test_a_model_without_a_last_norm_is_left_as_it_is() -> None:
    whole, less = cut(NO_LAST_NORM), cut(NO_LAST_NORM, without=("tail",))
    assert whole.receipt["last_norm_scale"] == 1.0
    others = less.model.state_dict()
    assert all(value.equal(others[key]) for key, value in whole.model.state_dict().items())


def test_a_family_that_names_another_norm_is_told_so_before_any_work() -> None:
    model = tiny("llama-gqa")
    family = replace(layer_views(model)[0].family, last_norm="norms")
    with pytest.raises(TrisectError, match=r"Unknown last norm of family llama 'norms'. Did you mean norm\?"):
        last_norm(model, family)
