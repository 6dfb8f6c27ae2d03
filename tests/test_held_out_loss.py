"""The held_out_loss's loss is the model's own, from whichever layer on it is computed."""

import pytest
import torch

from tiny_models import tiny, tokens
from trisect.models import layer_views
from trisect.pipeline.loss_curves import HeldOutLoss


@pytest.mark.parametrize("name", ["llama-gqa", "mpt", "qwen3"])
def test_the_judged_loss_is_the_models_own(name: str) -> None:
    model, ids = tiny(name), tokens(5, 20)
    held_out_loss = HeldOutLoss(model, layer_views(model), ids, batch_size=2)
    with torch.no_grad():
        expected = model(ids, labels=ids).loss.item()
    assert held_out_loss.loss(0) == pytest.approx(expected, rel=1e-5)
    held_out_loss.stream.advance(layer_views(model)[0])
    assert held_out_loss.loss(1) == pytest.approx(expected, rel=1e-5)
