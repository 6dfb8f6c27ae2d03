"""A cache of latents: it holds what the budget says, and nothing computed from it changes.

References: the same model without a cache; the same model with full keys and values cached.
"""

from typing import Any

import pytest
import torch
from factoring import mixed
from torch import Tensor

from tiny_models import SDPA, STORED, left_padded, logits, tokens
from tolerances import assert_same_but_for_rounding, assert_same_text, steps_of
from trisect.models import layer_views, shape_of
from trisect.plan import budget_of

# In float64, but eager attention takes its softmax in float32, and MPT has nothing else.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("name", STORED)
def test_generation_from_cached_latents_equals_generation_without_a_cache(name: str) -> None:
    model, ids = mixed(name), tokens(2, 9)
    mask = left_padded(ids)
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    settings["eos_token_id"] = None
    without = model.generate(ids, use_cache=False, **settings)
    for how in ({"use_cache": True}, {"cache_implementation": "static"}):
        assert_same_text(model, model.generate(ids, **how, **settings), without, mask)


@pytest.mark.parametrize("name", STORED)
def test_every_cached_step_has_the_logits_of_the_whole_text(name: str) -> None:
    model, ids = mixed(name).double(), tokens()
    whole = logits(model, ids, use_cache=False)
    past, steps = None, []
    with torch.no_grad():
        for piece in ids.split([6, 1, 3, 1], dim=1):
            output = model(piece, past_key_values=past, use_cache=True)
            past = output.past_key_values
            steps.append(output.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, **CLOSE)


@pytest.mark.parametrize("name", STORED)
def test_the_live_cache_is_as_small_as_the_budget_says(name: str) -> None:
    model, ids = mixed(name), tokens(2, 5)
    cache = model(ids, use_cache=True).past_key_values
    live = [(layer.keys, layer.values) for layer in cache.layers]
    size = sum(x.numel() * x.element_size() for pair in live for x in pair)
    assert size == budget_of(shape_of(model)).kv_bytes_per_token * ids.numel()
    shapes = shape_of(model).layers
    assert [values.shape[1] * values.shape[3] for _, values in live[:2]] == [4 * shapes[0].kv_heads, 6]
    # Keys are cached narrow where they are neither rotated nor normed, and only there.
    for index, rank in enumerate((5 * shapes[0].kv_heads, 3)):
        shape, keys = shapes[index], live[index][0]
        plain = shape.pairs == 0 and not shape.qk_norm
        assert keys.shape[1] * keys.shape[3] == (rank if plain else shape.kv_heads * shape.qk)


def test_some_families_cache_narrow_keys_and_some_do_not() -> None:
    """Otherwise the test above proves half of what it says."""
    plain = {name: shape_of(mixed(name)).layers[1].pairs == 0 for name in ("llama-gqa", "smollm3", "gpt2")}
    assert plain == {"llama-gqa": False, "smollm3": True, "gpt2": True}


@pytest.mark.parametrize("name", [name for name in SDPA if name in STORED])
def test_eager_and_sdpa_agree_on_cached_latents(name: str) -> None:
    model, ids = mixed(name, attention="sdpa"), tokens(2, 30)
    mask = left_padded(ids)
    fast = logits(model, ids, attention_mask=mask, use_cache=True)
    model.set_attn_implementation("eager")
    slow = logits(model, ids, attention_mask=mask, use_cache=True)
    assert_same_but_for_rounding(slow[mask.bool()], fast[mask.bool()], steps=steps_of(model))


@pytest.mark.parametrize("name", STORED)
def test_gradients_are_the_same_with_and_without_a_cache(name: str) -> None:
    ids, found = tokens(), []
    for use_cache in (False, True):
        model = mixed(name).double()
        model(ids, labels=ids, use_cache=use_cache).loss.backward()
        found.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    assert any("narrow" in key for key in found[0])
    assert found[0].keys() == found[1].keys()
    for key, gradient in found[0].items():
        torch.testing.assert_close(found[1][key], gradient, msg=key, **CLOSE)


@pytest.mark.parametrize("name", STORED)
def test_calibration_hears_full_keys_and_values_of_the_new_tokens(name: str) -> None:
    model, ids = mixed(name).double(), tokens()
    whole, heard = hear(model, ids), hear(model, ids[:, :6], ids[:, 6:])
    assert whole.keys() >= {(0, "q"), (0, "k"), (0, "v"), (0, "a")}
    for key, tensor in whole.items():
        torch.testing.assert_close(heard[key], tensor, **CLOSE)


@torch.no_grad()
def hear(model: Any, *pieces: Tensor) -> dict[tuple[int, str], Tensor]:
    """What the taps of every layer are given, token by token, over one text in pieces."""
    heard: dict[tuple[int, str], list[Tensor]] = {}
    views = layer_views(model, own=True)
    for view in views:

        def tap(name: str, *tensors: Tensor, index: int = view.index) -> None:
            if name != "rotated":
                heard.setdefault((index, name), []).append(tensors[0])

        view.attention.tap = tap
    past = None
    for piece in pieces:
        past = model(piece, past_key_values=past, use_cache=len(pieces) > 1).past_key_values
    for view in views:
        view.attention.tap = None
    return {key: torch.cat(tensors, dim=1) for key, tensors in heard.items()}
