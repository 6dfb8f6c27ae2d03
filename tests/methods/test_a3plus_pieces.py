"""The pieces that a3+ adds to the paper: each can be left out, and then only what comes behind it changes.

References: the whole of a3+, and the paper's own solution.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_models import tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.methods.a3plus import PIECES
from trisect.models import layer_views
from trisect.pipeline.run import Compressed, compress

QK_PIECES = ("softmax", "fold", "compensate")


def run(model: Any, *, count: int = 6, **more: Any) -> Compressed:
    settings = {"ratio": 0.25, "method": "a3+", "align": None, "qk_norm_tolerance": 1.0, "parts": ("qk",)}
    config = CompressConfig(**{**settings, **more})
    return compress(model, config, tokens=tokens_from_tensor(tokens(count, 20, seed=5)))


@cache
def state_without(*without: str, scope: str = "head") -> dict[str, Tensor]:
    settings = {"parts": ("qk", "ov", "mlp"), "layers": (0, 1), "rope_scope": scope}
    return run(tiny("llama-gqa"), count=32, without=without, **settings).model.state_dict()  # enough for every piece


def changed(a: dict[str, Tensor], b: dict[str, Tensor], layer: int) -> set[str]:
    """Names within a layer whose tensors differ, or that only one of the two has."""
    prefix = f"model.layers.{layer}."
    names = {name for name in (*a, *b) if name.startswith(prefix)}
    same = {name for name in names if name in a and name in b and torch.equal(a[name], b[name])}
    return {name.removeprefix(prefix).removesuffix(".weight") for name in names - same}


Q, K, V, OUT = (f"self_attn.{name}_proj" for name in "qkvo")
ROTARY = {"self_attn.rotary_index", "self_attn.rotary_rates"}
BEHIND = {
    "fisher": {Q, K, *ROTARY},
    "softmax": set(),
    "fold": set(),
    "compensate": {K, *ROTARY},
    "values": {Q, K, *ROTARY},
    "refit-o": {Q, K, V, *ROTARY},
    "eliminate": {Q, K, V, OUT, *ROTARY},
    "refit-up": {Q, K, V, OUT, *ROTARY},
    "refit-down": {Q, K, V, OUT, *ROTARY},
    "ridge": {Q, K, V, *ROTARY},
}
"""Piece -> what the first layer has already settled when the piece comes in."""


@pytest.mark.parametrize("piece", PIECES)
def test_every_piece_changes_what_comes_behind_it_and_nothing_before(piece: str) -> None:
    whole, less = state_without(), state_without(piece)
    if piece == "tail":  # behind all layers
        assert not any(changed(whole, less, layer) for layer in (0, 1))
        assert not whole["model.norm.weight"].equal(less["model.norm.weight"])
        return
    assert any(changed(whole, less, layer) for layer in (0, 1))
    if piece == "streams":  # the first layer is fed the same by both models
        assert not changed(whole, less, 0)
    else:
        assert not changed(whole, less, 0) & BEHIND[piece]


def test_where_heads_share_rates_softmax_has_no_part_in_the_choice() -> None:
    """Slots then go where the bilinear energies are, which only `fold` widens."""
    whole, less = state_without(scope="layer"), state_without("softmax", scope="layer")
    assert not any(changed(whole, less, layer) for layer in (0, 1))


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gpt_neox", "smollm3"])
def test_without_any_piece_of_qk_the_part_is_the_papers(name: str) -> None:
    # In float64: rounding turns singular vectors by as much more as two values lie close together.
    wide = {"dtype": torch.float64}
    ours = run(tiny(name, **wide), without=(*QK_PIECES, "streams")).model.state_dict()
    paper = run(tiny(name, **wide), method="a3").model.state_dict()
    assert ours.keys() == paper.keys()
    for key, value in paper.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-5)
        if name in ("llama-gqa", "qwen3"):  # no SVD: the very same columns
            assert ours[key].equal(value) or "norm" in key, key


@pytest.mark.parametrize("scope", ["layer", "model"])
def test_a_scope_is_kept_even_without_any_piece_of_qk(scope: str) -> None:
    for view in layer_views(run(tiny("llama-gqa"), without=QK_PIECES, rope_scope=scope).model):
        rates = view.part("qk").rates
        assert rates is not None
        assert rates.equal(rates[:1].expand_as(rates))


def test_compensation_can_be_left_out_where_nothing_is_folded() -> None:
    """QK-norm: the pairs of the whole a3+, their norm weights only corrected for the denominator."""
    whole, less = run(tiny("qwen3")), run(tiny("qwen3"), without=("compensate",))
    a, b = (result.model.state_dict() for result in (whole, less))
    assert a["model.layers.0.self_attn.rotary_index"].equal(b["model.layers.0.self_attn.rotary_index"])
    assert not a["model.layers.0.self_attn.q_norm.weight"].equal(b["model.layers.0.self_attn.q_norm.weight"])
    assert whole.losses[0]["loss"] < less.losses[0]["loss"]


def test_an_unknown_piece_is_refused_with_near_ones() -> None:
    with pytest.raises(TrisectError, match=r"Unknown piece of a3\+ 'folds'. Did you mean fold\?"):
        run(tiny("llama-gqa"), without=("folds",))
