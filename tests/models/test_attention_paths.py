"""Attention takes no slow path: whatever the widths, torch's math backend is never asked.

References: `torch._fused_sdp_choice` and `sdpa_kernel`, which refuse what a kernel does not take; eager
attention; the rules of torch's kernels as a table.
"""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from narrow_models import narrow
from tiny_models import PLAIN, SDPA, left_padded, tiny, tokens
from trisect.kernels.sdpa import Heads, Kind, Route, kind_of, one_query, prepared, route, sdpa
from trisect.models import load_model, mark_compressed, original_widths, save_model, shape_of
from trisect.models.attention import HeadLayout
from trisect.models.heads import eager
from trisect.models.looking import warn_of_slow_widths

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
UNEQUAL = [(12, 8), (8, 12), (7, 16)]


def unequal(name: str, part: str) -> Any:
    """Compressing queries and keys alone, or values alone, leaves widths that differ."""
    return narrow(name, attention="sdpa", parts=(part,))


@pytest.mark.parametrize("part", ["qk", "ov"])
@pytest.mark.parametrize("name", [name for name in SDPA if name in PLAIN])
def test_no_family_reaches_the_math_backend_on_a_cpu(name: str, part: str) -> None:
    model, ids = unequal(name, part), tokens(2, 9)
    shape = shape_of(model).layers[0]
    assert shape.qk != shape.vo
    with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # anything else raises
        for mask in (None, left_padded(ids)):
            past = model(ids, attention_mask=mask, use_cache=True).past_key_values
            grown = None if mask is None else torch.cat([mask, mask[:, -1:]], dim=1)
            logits = model(ids[:, :1], attention_mask=grown, past_key_values=past, use_cache=True).logits
            assert logits.isfinite().all()


def test_the_plain_call_would_reach_it() -> None:
    """Otherwise the test above proves nothing."""
    q, k, v = torch.randn(1, 2, 5, 12), torch.randn(1, 2, 5, 12), torch.randn(1, 2, 5, 8)
    assert torch._fused_sdp_choice(q, k, v) == SDPBackend.MATH.value
    assert torch._fused_sdp_choice(q, k, k) == SDPBackend.FLASH_ATTENTION.value
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No .* kernel|No viable"):
        torch.nn.functional.scaled_dot_product_attention(q, k, v)


class Reference(torch.nn.Module):
    """What eager attention looks for in a module."""

    training, is_causal = False, True


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("masked", ["no", "bool", "float", "per head"])
@pytest.mark.parametrize(("qk", "vo"), [*UNEQUAL, (8, 8)])
def test_fused_attention_equals_eager_attention(qk: int, vo: int, masked: str, length: int) -> None:
    q, k, v = torch.randn(2, 6, length, qk), torch.randn(2, 2, 5, qk), torch.randn(2, 2, 5, vo)
    visible = torch.ones(5, 5, dtype=torch.bool).tril()[-length:].expand(2, 1, -1, -1).clone()
    visible[1, :, :, 0] = False  # padded on the left
    visible[..., -1] |= length == 1
    visible[:, :, 0, :2] |= length == 5
    additive = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    mask: Tensor | None = {"bool": visible, "float": additive, "no": None}.get(masked)
    if masked == "per head":
        mask = additive + torch.randn(1, 6, 1, 5)
    plain = torch.ones(5, 5, dtype=torch.bool).tril()[-length:]
    reference = torch.where(plain, 0.0, -torch.inf) if masked == "no" else additive
    reference = mask if masked == "per head" else reference
    expected, _ = eager(Reference(), q, k, v, reference, scaling=0.3)
    torch.testing.assert_close(sdpa(q, k, v, mask, scale=0.3), expected, **CLOSE)


def test_a_single_query_is_answered_without_copying_the_cache() -> None:
    q = torch.randn(2, 6, 1, 12)
    keys, values = torch.randn(2, 2, 40, 12)[:, :, :30], torch.randn(2, 2, 40, 8)[:, :, :30]
    with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
        found = sdpa(q, keys, values, None, scale=0.3)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest < values.numel() * values.element_size()
    torch.testing.assert_close(found, eager(Reference(), q, keys, values, None, scaling=0.3)[0], **CLOSE)


def test_low_precision_scores_of_a_single_query_are_summed_in_float32() -> None:
    q, k, v = (torch.randn(1, 2, n, 16) for n in (1, 300, 300))
    exact = one_query(q.double(), k.double(), v.double(), None, scale=0.25)
    found = one_query(q.bfloat16(), k.bfloat16(), v.bfloat16(), None, scale=0.25)
    torch.testing.assert_close(found.double(), exact, rtol=0.05, atol=0.02)


@pytest.mark.parametrize(("dtype", "qk", "vo"), [(torch.float32, 12, 11), (torch.bfloat16, 16, 10)])
def test_heads_for_a_gpu_begin_at_whole_16_bytes_wherever_a_fused_product_left_them(
    dtype: torch.dtype, qk: int, vo: int
) -> None:
    """Queries are as wide as the padded heads, so that nothing else would move them."""
    columns = torch.empty(2, 8, 6 * qk + 2 * qk + 2 * vo, dtype=dtype, device="meta")
    heads = HeadLayout(heads=6, kv_heads=2, qk=qk, vo=vo).split([columns])
    found = prepared(*(x.transpose(1, 2) for x in heads), Route(pad=qk))
    for x in found:
        assert x.shape[-1] == qk
        assert all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])


# What torch's kernels take (docs/runtime.md): the rules themselves, to hold the routes against.
def takes(kind: Kind, h: Heads, way: Route) -> bool:
    qk, vo = (way.pad, way.pad) if way.pad else (h.qk, h.vo)
    grouped, half = h.group > 1 and not way.repeat, h.bytes_per_element == 2
    step = 16 // h.bytes_per_element
    if kind == "cpu":
        return qk == vo
    aligned = qk % step == 0 == vo % step
    cudnn = kind == "cudnn" and half and aligned and max(qk, vo) <= 128
    flash = half and qk == vo <= 256 and aligned and not h.masked
    return cudnn or flash or (aligned and not grouped)


HEADS = st.builds(
    Heads,
    qk=st.integers(1, 256),
    vo=st.integers(1, 256),
    group=st.sampled_from([1, 3, 8]),
    masked=st.booleans(),
    single=st.booleans(),
    bytes_per_element=st.sampled_from([2, 4]),
)


@given(heads=HEADS, kind=st.sampled_from(["cpu", "cudnn", "cuda"]))
def test_every_route_ends_at_a_fused_kernel_or_copies_nothing(heads: Heads, kind: Kind) -> None:
    way = route(kind, heads)
    if way.plain:
        assert heads.single
        assert not takes(kind, heads, Route())
    else:
        assert takes(kind, heads, way)
        assert way.pad is None or way.pad >= max(heads.qk, heads.vo)
    if takes(kind, heads, Route()) and not (kind == "cuda" and not heads.masked):
        assert way == Route()


@given(heads=HEADS.filter(lambda h: h.single), kind=st.sampled_from(["cpu", "cudnn", "cuda"]))
def test_no_route_copies_the_cache_for_a_single_token(heads: Heads, kind: Kind) -> None:
    assert not route(kind, heads).copies


def test_the_measured_widths_go_where_they_should() -> None:
    plain = Heads(qk=96, vo=96, group=1, masked=False, single=False)
    for widths in ((96, 96), (80, 64), (64, 80), (128, 128)):
        assert route("cudnn", plain._replace(qk=widths[0], vo=widths[1])) == Route()
    assert route("cudnn", plain._replace(qk=76, vo=80)) == Route(pad=80)
    assert route("cuda", plain._replace(qk=80, vo=64)) == Route(pad=80)
    assert route("cuda", plain._replace(qk=80, vo=64, group=4, masked=True)) == Route(repeat=True)
    assert kind_of(torch.device("cpu")) == "cpu"


@pytest.mark.parametrize("part", ["qk", "ov"])
def test_flash_attention_is_given_one_width_even_where_values_are_wider(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own wrapper pads values up to keys, and would cut wider ones off."""
    seen: list[tuple[int, ...]] = []

    def flash(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
        seen.append((q.shape[-1], k.shape[-1], v.shape[-1]))
        return eager(module, q, k, v, mask, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "flash_attention_2", flash)
    model, ids = unequal("llama-gqa", part), tokens(1, 6)
    mask = torch.full((6, 6), torch.finfo(torch.float32).min).triu(1)[None, None]
    expected = model(ids).logits
    model.config._attn_implementation = "flash_attention_2"
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, expected, **CLOSE)
    assert seen == [(16, 16, 16)] * 3


@pytest.mark.parametrize("part", ["qk", "ov"])
def test_sglang_is_given_the_width_of_its_cache(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function wants rows as wide as RadixAttention's heads, and puts out such rows (SGLang 0.5.23)."""

    def radix(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Any:
        assert {x.shape[-1] for x in (q, k, v)} == {kwargs["attention_instances"][module.layer_idx].head_dim}
        return eager(module, q, k, v, mask, **kwargs)[0].flatten(2).squeeze(0), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sglang", radix)
    model, ids = unequal("llama-gqa", part), tokens(1, 6)
    mask = torch.full((6, 6), torch.finfo(torch.float32).min).triu(1)[None, None]
    expected = model(ids).logits
    model.config._attn_implementation = "sglang"
    instances = {layer: SimpleNamespace(head_dim=16) for layer in range(3)}
    found = model(ids, attention_mask=mask, attention_instances=instances).logits
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, logger="trisect"):
        yield caplog


def test_loading_says_once_what_will_be_slow(
    said: pytest.LogCaptureFixture, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(unequal("llama-gqa", "qk"), None, tmp_path / "out", receipt={})
    monkeypatch.setattr("trisect.models.looking.kind_of", lambda device: "cuda")
    load_model(str(tmp_path / "out"), dtype="bfloat16")
    assert len(said.records) == 1
    assert "layers 0, 1, 2 have widths that are no multiple of 8" in said.text


def test_nothing_is_said_where_nothing_is_slow(said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    warn_of_slow_widths(unequal("llama-gqa", "qk"))  # on a CPU
    monkeypatch.setattr("trisect.models.looking.kind_of", lambda device: "cuda")
    stock = tiny("llama-gqa")
    kind = type(stock.model.layers[0].self_attn)
    warn_of_slow_widths(stock)
    whole = tiny("llama-gqa")
    warn_of_slow_widths(mark_compressed(whole, original=original_widths(whole), method="a3", ratio=0.0).bfloat16())
    assert not said.records
    assert type(stock.model.layers[0].self_attn) is kind  # a stock model stays stock


@pytest.mark.parametrize("name", ["llama-gqa", "phi3", "gpt2"])
def test_eager_stays_reachable(name: str) -> None:
    model, ids = unequal(name, "ov"), tokens(2, 7)
    fast = model(ids).logits
    model.set_attn_implementation("eager")
    output = model(ids, output_attentions=True)
    torch.testing.assert_close(output.logits, fast, **CLOSE)
    assert output.attentions[0].shape[-2:] == (7, 7)
