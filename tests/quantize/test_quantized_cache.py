"""KV caches: a narrow one weighs what the plan says, a quantised one what its bits say, and both generate."""

from typing import Any

import pytest
import torch
from quantize_models import narrow, need_hqq
from transformers import DynamicCache

from tiny_models import tiny, tokens
from tolerances import assert_same_text
from trisect.errors import TrisectError
from trisect.models import shape_of
from trisect.plan import budget_of
from trisect.quantize import PackedLayer, cache_bytes, quantized_cache

PROMPT, NEW = 8, 48
KV = {"parts": ("qk", "ov"), "kv_ratio": 0.5, "align": 8}


@pytest.fixture(autouse=True)
def _hqq() -> None:
    need_hqq()


def generated(model: Any, cache: Any, *, batch: int = 2, new: int = NEW, **settings: Any) -> torch.Tensor:
    ids = tokens(batch, PROMPT)
    # MPT's config turns the cache off unless it is asked for.
    options = {"do_sample": False, "use_cache": True, "pad_token_id": 0, "eos_token_id": None, **settings}
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, past_key_values=cache, **options
    )


@pytest.mark.parametrize(
    ("name", "method"), [("llama-mha", "a3"), ("llama-gqa", "a3+"), ("mpt", "a3+"), ("gpt_neox", "a3")]
)
def test_kv_mode_generates_from_a_narrow_cache_of_the_size_that_was_planned(name: str, method: str) -> None:
    model = narrow(name, method=method, **KV)
    was, now = budget_of(shape_of(tiny(name))), budget_of(shape_of(model))
    assert now.kv_bytes_per_token <= 0.5 * was.kv_bytes_per_token
    assert now.components["mlp"] == was.components["mlp"]
    cache = DynamicCache()
    text = generated(model, cache)
    assert text.shape == (2, PROMPT + NEW)
    # The last token was chosen, but nothing was computed from it yet.
    assert cache.get_seq_length() == PROMPT + NEW - 1
    assert cache_bytes(cache) == 2 * (PROMPT + NEW - 1) * now.kv_bytes_per_token
    with torch.no_grad():
        alone = model(text, use_cache=False).logits[:, PROMPT - 1 : -1].argmax(-1)
    assert_same_text(model, torch.cat([text[:, :PROMPT], alone], dim=1), text)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_the_cache_holds_what_hqq_makes_of_keys_and_values(bits: int) -> None:
    from hqq.core.quantize import Quantizer

    torch.manual_seed(0)
    keys, values = torch.randn(2, 3, 5, 24), 3 + torch.randn(2, 3, 5, 40)
    layer = PackedLayer(bits=bits, group_sizes=(24, 8), residual_length=0)
    # Piece by piece, because HQQ stops by the error over all that it is given at once.
    steps = [slice(0, 3), slice(3, 4), slice(4, 5)]
    parts = [layer.update(keys[:, :, step], values[:, :, step]) for step in steps]
    for read, x, size in zip(parts[-1], (keys, values), (24, 8), strict=True):
        for step in steps:
            levels, meta = Quantizer.quantize(
                x[:, :, step], nbits=bits, group_size=size, axis=1, round_zero=bits == 4, bitpack=False, device="cpu"
            )
            theirs = ((levels - meta["zero"]) * meta["scale"]).view(x[:, :, step].shape)
            assert torch.allclose(read[:, :, step], theirs, rtol=2e-3, atol=4e-3)
    # A token is quantised once: what was read of it first is read of it ever after.
    assert torch.equal(parts[0][0], parts[-1][0][..., :3, :])
    assert layer.get_seq_length() == 5


@pytest.mark.parametrize(("name", "bits"), [("llama-gqa", 4), ("mpt", 3), ("opt", 8)])
def test_a_quantised_cache_weighs_its_bits_and_scales_and_the_recent_tokens(name: str, bits: int) -> None:
    model = narrow(name, **KV)
    cache = quantized_cache(model, bits=bits, residual_length=16)
    assert generated(model, cache).shape == (2, PROMPT + NEW)
    seen = PROMPT + NEW - 1
    recent = cache.layers[0].keys.shape[-2]
    assert 0 < recent <= 16
    shape = shape_of(model)
    whole = packed = 0
    for layer in shape.layers:
        for width in (layer.qk, layer.vo):
            whole += layer.kv_heads * width * 4
            packed += layer.kv_heads * (width * bits // 8 + 2 * 2)  # one group per head: a scale, an offset
    assert whole == budget_of(shape).kv_bytes_per_token
    assert cache_bytes(cache) == 2 * (recent * whole + (seen - recent) * packed)


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "mpt", "mistral3-wrapper", "qwen3"])
def test_eight_bits_continue_almost_as_the_full_cache_does(name: str) -> None:
    model = tiny(name)
    ids = tokens(2, 40)
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        off = {}
        for bits in (8, 2):
            cache = quantized_cache(model, bits=bits, residual_length=0)
            got = [model(ids[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in ((0, 30), (30, 40))]
            off[bits] = ((torch.cat(got, dim=1) - wanted).norm() / wanted.norm()).item()
    assert off[8] < 0.02
    assert off[8] < off[2]


def test_recent_tokens_are_read_as_they_are() -> None:
    model = tiny("llama-gqa")
    cache = quantized_cache(model, bits=2, residual_length=100)
    full = DynamicCache()
    assert_same_text(model, generated(model, cache), generated(model, full))
    assert cache_bytes(cache) == cache_bytes(full)


def test_beams_take_their_packed_tokens_along() -> None:
    model = tiny("llama-gqa")
    beams: dict[str, Any] = {"num_beams": 3, "new": 12}
    exact = generated(model, quantized_cache(model, bits=2, residual_length=100), **beams)
    assert torch.equal(exact, generated(model, DynamicCache(), **beams))
    layer = PackedLayer(bits=8, group_sizes=(8, 8), residual_length=2)
    x = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 1, 5, 8).contiguous()
    layer.update(x, -x)
    layer.update(x[..., :1, :], -x[..., :1, :])
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    keys, values = layer.update(x[[2, 0, 0]][..., :1, :], -x[[2, 0, 0]][..., :1, :])
    assert keys.shape == (3, 1, 7, 8)
    assert torch.allclose(keys, x[[2, 0, 0]][..., :1, :].expand(3, 1, 7, 8), atol=1e-2)
    assert torch.allclose(values, -keys, atol=1e-2)
    layer.batch_repeat_interleave(2)
    assert layer.keys.shape[0] == layer.packed[0][0].shape[0] == 6
    layer.reset()
    assert layer.get_seq_length() == 0
    with pytest.raises(TrisectError, match="cannot be cropped"):
        layer.crop(-1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 5}, "use one of 8, 4, 3, 2"),
        ({"residual_length": -1}, "0 or more, got -1"),
        ({"group_size": 24}, "Groups of 24 do not divide the cached heads of layer 0, 16 wide; use 16, 8"),
    ],
)
def test_caches_that_cannot_be_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(TrisectError, match=message):
        quantized_cache(tiny("llama-gqa"), **settings)


def test_widths_off_the_grid_are_refused_with_the_option_that_makes_them_fit() -> None:
    model = narrow("llama-gqa", parts=("ov",), ratio=0.4)
    with pytest.raises(TrisectError, match="no multiple of 8; compress with --align 8"):
        quantized_cache(model)
