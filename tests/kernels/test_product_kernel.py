"""The product of one row with a matrix, with what happens before and behind it: the formulas in float64."""

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

from narrow_models import narrow
from tiny_models import tiny, tokens
from tolerances import assert_same_text
from trisect.decode import Decoder, layer
from trisect.decode.layer import FusedLayer, fuse_layers, sums_twice
from trisect.decode.prepare import prepare_for_inference
from trisect.kernels import using
from trisect.models import layer_views

EPS = 1e-2


def normed(x: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt()


@given(
    width=st.sampled_from([1, 7, 40]), depth=st.sampled_from([32, 64, 100]), options=st.tuples(*[st.booleans()] * 5)
)
@settings(max_examples=20, deadline=None)
def test_a_product_norms_gates_and_adds_as_written_out(
    kernels: dict[str, ModuleType], width: int, depth: int, options: tuple[bool, ...]
) -> None:
    norm, bias, gate, residual, gain = options
    g = torch.Generator().manual_seed(width + depth)
    module, rows = kernels["triton_product"], 2 * width if gate else width
    x, weight, b = (torch.randn(*shape, generator=g) for shape in ((1, depth), (rows, depth), (rows,)))
    more, by = torch.randn(1, width, generator=g), torch.rand(width, generator=g)
    squares = x.view(-1, 4).square().sum(dim=1) if norm else None
    found, carried = module.launch(
        x, weight, b if bias else None, squares=squares, eps=EPS, gate=gate,
        residual=more if residual else None, gain=by if gain else None, tiles=module.Tiles(4, 32, 1, 2),
    )  # fmt: skip
    y = (normed(x.double()) if norm else x.double()) @ weight.double().T + (b.double() if bias else 0)
    y = silu(y[:, :width]) * y[:, width:] if gate else y
    y = y + more.double() if residual else y
    close: Any = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found.double(), y, **close)
    if gain:
        torch.testing.assert_close(carried.scaled.double(), y * by.double(), **close)
        torch.testing.assert_close(carried.squares.sum().double(), y.square().sum(), **close)
    else:
        assert carried is None


def test_what_a_product_carries_is_what_the_next_one_norms_with(kernels: dict[str, ModuleType]) -> None:
    g = torch.Generator().manual_seed(0)
    launch = kernels["triton_product"].launch
    x, first, second = (torch.randn(*shape, generator=g) for shape in ((1, 48), (60, 48), (20, 60)))
    gain = torch.rand(60, generator=g)
    hidden, carried = launch(x, first, residual=torch.ones(1, 60), gain=gain)
    found, _ = launch(carried.scaled, second, squares=carried.squares, eps=EPS)
    expected = (normed(hidden.double()) * gain.double()) @ second.double().T
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def one_row(kernels: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Fused layers run here, in the interpreter; the list has every product's output."""
    made: list[Tensor] = []

    def product(*args: Any, **named: Any) -> Any:
        found = kernels["triton_product"].launch(*args, **named)
        made.append(found[0])
        return found

    monkeypatch.setattr(layer, "product", product)
    monkeypatch.setattr(layer, "ALIGN", 1)  # of tiny models everything is fast
    monkeypatch.setattr(layer, "is_one_row", lambda x: x.numel() == x.shape[-1])
    return made


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2", "qwen3", "phi3"])
def test_a_fused_layer_decodes_what_generate_generates(name: str, one_row: list[Tensor]) -> None:
    model, ids = narrow(name, attention="sdpa"), tokens(1, 6)
    expected = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    with using(decode="kernel"):
        found = Decoder(model, batch=1, max_length=12).generate(ids, 3)
    assert_same_text(model, found, expected)
    layers = model.config.get_text_config().num_hidden_layers
    assert len(one_row) == 2 * 4 * layers  # two steps behind the prompt


@pytest.mark.parametrize("name", ["granite", "olmo2", "gemma3", "cohere", "mpt"])
def test_layers_that_compute_something_else_stay_as_they_are(name: str) -> None:
    model = prepare_for_inference(tiny(name))
    views = layer_views(model)
    fuse_layers(views)
    assert not any(isinstance(view.layer, FusedLayer) for view in views)


def test_a_layer_is_tried_not_known_by_name() -> None:
    found = layer_views(prepare_for_inference(tiny("llama-gqa")))[0].layer
    assert sums_twice(found)
    stock = type(found).forward
    type(found).forward = lambda self, x, **named: 2 * stock(self, x, **named)
    try:
        assert not sums_twice(found)
    finally:
        type(found).forward = stock


def test_a_hidden_state_that_somebody_replaced_is_normed_anew(one_row: list[Tensor]) -> None:
    """What a layer carries belongs to the tensor it put out, and to no other one."""
    model, ids = narrow("llama-gqa", attention="sdpa"), tokens(1, 6)
    expected = model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=0)
    hook = layer_views(model)[0].layer.register_forward_hook(lambda module, given, out: out.clone())
    with using(decode="kernel"):
        assert_same_text(model, Decoder(model, batch=1, max_length=12).generate(ids, 3), expected)
    hook.remove()


def test_what_is_carried_for_one_norm_is_of_no_use_to_another(one_row: list[Tensor]) -> None:
    """Somebody may have taken a layer out since they were fused."""
    model, ids = tiny("llama-gqa", attention="sdpa"), tokens(1, 6)
    with using(decode="kernel"):
        decoder = Decoder(model, batch=1, max_length=12)
        expected = decoder.generate(ids, 3)
        other = copy.deepcopy(model.model.norm)
        torch.nn.init.normal_(other.weight, generator=torch.Generator().manual_seed(0))
        for each in model.model.layers[:-1]:
            each.behind = (other,)
        assert decoder.generate(ids, 3).equal(expected)
    assert one_row
