"""Looking at a model leaves it as it was: shapes, fingerprints, summaries and plans change nothing on it."""

from typing import Any

import pytest
import torch

import trisect
from tiny_models import CONFIGS, tiny, tokens
from trisect import api
from trisect.models import fingerprint, layer_views, original_shape, original_widths, shape_of, zeros_of


def traces(model: Any) -> list[tuple[type, dict[str, Any]]]:
    """The class of every module and what hangs on it: tables of hooks and children too."""
    held = []
    for module in model.modules():
        found = {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        held.append((type(module), found))
    return held


@pytest.mark.parametrize("name", CONFIGS)
def test_looking_at_a_model_leaves_no_trace(name: str) -> None:
    model = tiny(name)
    before, config = traces(model), model.config.to_dict()
    weights = {key: (value, value.clone()) for key, value in model.state_dict(keep_vars=True).items()}
    shape_of(model), original_shape(model), original_widths(model), zeros_of(model), fingerprint(model)
    str(api.summary(model))
    api.plan(model, trisect.CompressConfig(ratio=0.25, align=None))
    for view in layer_views(model):
        for part in (*view.components, *view.linears()):
            view.part(part)
        view.projections(), view.factored(), view.heads
    after = traces(model)
    assert [kind for kind, _ in after] == [kind for kind, _ in before]
    for (_, now), (kind, then) in zip(after, before, strict=True):
        assert now.keys() == then.keys(), kind
        assert all(now[key] is then[key] or now[key] == then[key] for key in then), kind
    assert model.config.to_dict() == config
    state = model.state_dict(keep_vars=True)
    assert state.keys() == weights.keys()
    assert all(state[key] is held and held.equal(value) for key, (held, value) in weights.items())


def test_work_owns_the_attention_and_names_stay() -> None:
    model = tiny("llama-gqa")
    stock = type(model.model.layers[0].self_attn)
    names, expected = set(model.state_dict()), model(tokens()).logits
    with pytest.raises(AssertionError, match="own"):
        layer_views(model)[0].attention  # noqa: B018
    views = layer_views(model, own=True)
    assert all(type(view.attention) is not stock and isinstance(view.attention, stock) for view in views)
    assert set(model.state_dict()) == names
    torch.testing.assert_close(model(tokens()).logits, expected)
