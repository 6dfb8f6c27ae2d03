"""Very wide Grams are stored in float32: what is made of them stays what it was, to that rounding."""

import pytest
import torch

from tiny_models import logits, tiny, tokens
from trisect.calibrate import moments
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.pipeline.run import compress


def narrow_logits() -> torch.Tensor:
    model = tiny("llama-gqa")
    given = tokens_from_tensor(tokens(8, 64))
    compress(model, CompressConfig(ratio=0.3, method="a3+", align=None), tokens=given)
    return logits(model, tokens(2, 16, seed=5))


def test_compressing_with_rounded_grams_gives_the_same_model_to_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = narrow_logits()
    kept: list[torch.dtype] = []
    stored = moments.Accumulator._stored

    def noting(self: moments.Accumulator, name: str, mean: torch.Tensor) -> torch.Tensor:
        found = stored(self, name, mean)
        if name.startswith("mlp_gram"):
            kept.append(found.dtype)
        else:
            assert name.startswith("a_gram") or found.dtype == mean.dtype, name
        return found

    monkeypatch.setattr(moments, "WIDE_GRAM", 0)
    monkeypatch.setattr(moments.Accumulator, "_stored", noting)
    found = narrow_logits()
    assert set(kept) == {torch.float32}
    assert (found - expected).norm() <= 1e-3 * expected.norm()
    assert not found.equal(expected)


def test_a_moment_that_is_not_finite_is_refused_by_name() -> None:
    accumulator = moments.Accumulator(frozenset({"mlp"}))
    accumulator("down", torch.tensor([[[1.0, float("inf"), float("-inf")]]]))
    with pytest.raises(moments.TrisectError, match=r"Layer 3: the activations behind 'mlp' hold NaN or inf"):
        accumulator.means(3)
