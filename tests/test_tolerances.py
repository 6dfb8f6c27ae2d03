"""The tolerance of tests lets rounding through and nothing else.

References: sums in two orders; weights changed by a little; ties by hand.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_models import logits, tiny, tokens
from tolerances import assert_same_but_for_rounding, assert_same_model, assert_same_text, steps_of


@pytest.mark.parametrize("terms", [10, 48, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_in_another_order_are_the_same_but_for_rounding(terms: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(terms)
    x = torch.randn(500, terms, generator=generator, dtype=dtype)
    backwards = torch.zeros(500, dtype=dtype)
    for column in reversed(x.unbind(dim=1)):
        backwards += column
    assert_same_but_for_rounding(backwards, x.sum(dim=1), steps=1)


@pytest.mark.parametrize("share", [2.0, 1.01, 1.0001])
def test_a_wrong_factor_in_one_layer_is_not_rounding(share: float) -> None:
    model, other, ids = tiny("llama-gqa"), tiny("llama-gqa"), tokens()
    with torch.no_grad():
        other.model.layers[1].self_attn.v_proj.weight *= share
    with pytest.raises(AssertionError, match="not close"):
        assert_same_but_for_rounding(logits(other, ids), logits(model, ids), steps=steps_of(model))
    with pytest.raises(AssertionError, match="v_proj"):
        assert_same_model(other, model, ids)


def choosing(*scores: float) -> Any:
    """A model of one layer that gives every token the same scores, whatever comes before."""
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=1))

    class Model:
        def __call__(self, ids: Tensor, **_: Any) -> Any:
            return SimpleNamespace(logits=torch.tensor(scores).expand(*ids.shape, -1))

    model = Model()
    model.config = config  # type: ignore[attr-defined]
    return model


def test_texts_may_part_at_a_tie_and_only_there() -> None:
    expected, found = torch.tensor([[5, 0, 0, 0], [5, 0, 0, 0]]), torch.tensor([[5, 0, 0, 0], [5, 0, 1, 2]])
    assert_same_text(choosing(1.0, 1.0 + 1e-6, 0.0), found, expected)
    with pytest.raises(AssertionError, match="text 1 parts at token 2"):
        assert_same_text(choosing(1.0, 0.999, 0.0), found, expected)
    with pytest.raises(AssertionError, match="longer"):
        assert_same_text(choosing(1.0, 1.0, 1.0), found[:, :3], expected)
