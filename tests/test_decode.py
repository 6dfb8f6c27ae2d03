"""The decode loop says what transformers' generate says, from a cache as small as the plan.

References: `generate(do_sample=False)`; the budget's KV bytes; dynamo's count of compilations.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from narrow_models import narrow
from tiny_models import PLAIN, left_padded, logits, tiny, tokens
from tolerances import assert_same_but_for_rounding, assert_same_text, steps_of
from trisect.decode import Decoder, prepare_for_inference
from trisect.decode.decoder import recordable_experts
from trisect.decode.prepare import compile_layers
from trisect.errors import TrisectError
from trisect.kernels import using
from trisect.models import layer_views, load_model, save_model, shape_of
from trisect.plan import budget_of

NEW = 9


def decode(model: Any, ids: Tensor, new: int, **settings: Any) -> Tensor:
    """What a Decoder just large enough makes of prompts."""
    return Decoder(model, batch=ids.shape[0], max_length=ids.shape[1] + new).generate(ids, new, **settings)


def generated(model: Any, ids: Tensor, mask: Tensor | None = None, new: int = NEW, **settings: Any) -> Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    settings = {"eos_token_id": None, "pad_token_id": 0, **settings}
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **settings)


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("name", [*PLAIN, "mixtral", "qwen3_moe", "qwen2_moe", "granitemoe"])
def test_every_family_decodes_what_generate_generates(name: str, operators: bool) -> None:
    """With torch's attention in buckets, and with the operators that a GPU has kernels for."""
    model, ids = narrow(name), tokens(3, 8)
    expected = generated(model, ids), generated(model, ids, left_padded(ids))
    with using(decode="kernel" if operators else "plain"):
        decoder = Decoder(model, batch=3, max_length=20, bucket=None if operators else 4)
        # The last text shows that nothing of the one before is left.
        for mask, text in ((None, expected[0]), (left_padded(ids), expected[1]), (None, expected[0])):
            assert_same_text(model, decoder.generate(ids, NEW, attention_mask=mask), text, mask)
    if operators and not name.startswith(("mpt", "gemma2", "hunyuan")):  # the kernel is not for these
        assert decoder.bucket == 20


def test_a_model_that_cannot_be_recorded_decodes_without_graphs_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(step: Any, **settings: Any) -> None:
        step()  # as far as it got
        raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture\nmore")

    monkeypatch.setattr("trisect.decode.decoder.record_graph", refuse)
    model, ids = narrow("mpt"), tokens(3, 8)
    expected = generated(model, ids)
    decoder = Decoder(model, batch=3, max_length=20, bucket=4)
    decoder._records = True  # as on a GPU
    assert_same_text(model, decoder.generate(ids, NEW), expected, None)
    assert caplog.text.count("decoding without CUDA graphs, more slowly: Cannot copy") == 1
    insisting = Decoder(model, batch=3, max_length=20, mode="eager")
    insisting._records = True
    with pytest.raises(RuntimeError, match="graph capture"):
        insisting.generate(ids, NEW)


def test_experts_in_a_graph_are_those_outside() -> None:
    """Grouped products where they ask nothing of the device, gathered weights elsewhere."""
    model, ids = narrow("mixtral"), tokens(2, 3)
    before, expected = model.config._experts_implementation, logits(model, ids)
    with recordable_experts(layer_views(model), batch=2):
        assert model.config._experts_implementation == "batched_mm"
        assert_same_but_for_rounding(logits(model, ids), expected, steps=steps_of(model))
    assert model.config._experts_implementation == before
    half = model.bfloat16()
    for batch, chosen in ((1, "batched_mm"), (2, "grouped_mm")):
        with recordable_experts(layer_views(half), batch=batch):
            assert half.config._experts_implementation == chosen
    for view in layer_views(half):  # rows of no whole number of 16 bytes
        view.write(view.experts.blank(18, dropped=0))
    with recordable_experts(layer_views(half), batch=2):
        assert half.config._experts_implementation == "batched_mm"


class Questions(TorchDispatchMode):
    """What is asked of the host inside, which no CUDA graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        picks = args[1] if func is torch.ops.aten.index.Tensor else ()
        if func.name().startswith(ASKING) or any(x is not None and x.dtype == torch.bool for x in picks):
            self.asked.append(func.name())
        return func(*args, **(kwargs or {}))


ASKING = ("aten::_local_scalar_dense", "aten::nonzero", "aten::_unique", "aten::masked_select", "aten::bincount")
MIXTURES = ["qwen3_moe-all", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3", "glm4_moe", "granitemoe"]


@pytest.mark.parametrize("name", MIXTURES)
def test_a_step_of_a_mixture_that_a_graph_is_to_hold_asks_nothing_of_the_host(name: str) -> None:
    model = narrow(name)
    model.set_attn_implementation("sdpa")
    model.set_experts_implementation("eager")
    decoder = Decoder(model, batch=2, max_length=20, bucket=4)
    decoder.prefill(tokens(2, 5), left_padded(tokens(2, 5)))
    decoder.cache.clock.live = 8
    with Questions() as outside, torch.no_grad():
        decoder._advance()
    with recordable_experts(layer_views(model), batch=2), Questions() as inside, torch.no_grad():
        decoder._advance()
    assert outside.asked
    assert not inside.asked


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_folded_and_unequal_heads_decode_alike_in_any_batch(batch: int) -> None:
    model = tiny("llama-gqa", attention="sdpa")
    for view in layer_views(model):
        view.resize(replace(view.shape(), vo=8))
        rates = torch.rand(2, 8, generator=torch.Generator().manual_seed(view.index))
        view.write(replace(view.part("qk"), rates=rates))
        for module in (view.attention.v_proj, view.attention.o_proj):
            torch.nn.init.normal_(module.weight, std=0.2)
    ids = tokens(batch, 6)
    expected = generated(model, ids)
    for choice in ("plain", "kernel"):
        with using(decode=choice):  # type: ignore[arg-type]
            assert_same_text(model, decode(model, ids, NEW), expected)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2", "gpt_neox", "mpt"])
def test_the_cache_is_as_small_as_the_plan(name: str) -> None:
    model = narrow(name)
    decoder = Decoder(model, batch=2, max_length=16)
    decoder.prefill(tokens(2, 5))
    assert decoder.cache_bytes == budget_of(shape_of(model)).kv_bytes_per_token * 2 * 16


@pytest.mark.parametrize("name", ["llama-gqa", "phi3", "opt", "mistral-window"])
@pytest.mark.parametrize("operators", [False, True])
def test_equal_layers_are_compiled_once(name: str, operators: bool) -> None:
    """Any index of a layer that the compiler saw would have it compile every layer, until it gives up."""
    torch._dynamo.reset()
    model, ids = tiny(name, attention="sdpa"), tokens(2, 6)
    expected = generated(model, ids)
    choice = "kernel" if operators else "plain"
    with using(decode=choice, rotary=choice):  # type: ignore[arg-type]
        decoder, counter = Decoder(model, batch=2, max_length=16, bucket=16), CompileCounter()
        found = [decoder.prefill(ids)]
        compile_layers(layer_views(model), backend=counter, fullgraph=True)
        found += [decoder.step() for _ in range(NEW - 1)]
    assert_same_text(tiny(name), torch.cat([ids, torch.stack(found, dim=1)], dim=1), expected)
    assert counter.frame_count == 1


def test_texts_end_where_generate_ends_them() -> None:
    model, ids = tiny("llama-gqa"), tokens(3, 6)
    free = generated(model, ids, new=12)
    for eos in (int(free[0, 8]), int(free[1, 10]), int(free[2, 17])):
        expected = generated(model, ids, new=12, eos_token_id=eos)
        found = decode(model, ids, 12, eos_token_id=eos, pad_token_id=0)
        assert found.equal(expected)
    same = ids[:1].repeat(3, 1)
    eos = int(free[0, 7])
    assert decode(model, same, 40, eos_token_id=eos).equal(generated(model, same, new=40, eos_token_id=eos))


def test_seeking_goes_on_as_if_tokens_had_been_there() -> None:
    model, ids = tiny("llama-gqa"), tokens(2, 10)
    decoder = Decoder(model, batch=2, max_length=16)
    decoder.prefill(ids)
    steps = [decoder.step() for _ in range(3)]
    decoder.seek(11)
    decoder.tokens.copy_(steps[0])
    assert decoder.step().equal(steps[1])


@pytest.mark.parametrize("name", ["llama-gqa", "llama-biases", "qwen3", "phi3", "gpt2"])
def test_preparing_keeps_outputs_gradients_and_what_is_saved(name: str, tmp_path: Path) -> None:
    model, ids = narrow(name), tokens(2, 9)
    stock = copy.deepcopy(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    prepare_for_inference(model)
    with torch.no_grad():
        assert_same_but_for_rounding(model(ids).logits, stock(ids).logits, steps=steps_of(stock))
    for each in (model, stock):
        each(ids, labels=ids).loss.backward()
    gradients = {key: p.grad for key, p in stock.named_parameters() if p.grad is not None}
    for key, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, gradients[key], rtol=1e-4, atol=1e-5)
    save_model(model, None, tmp_path / "out", receipt={})
    after = load_model(str(tmp_path / "out")).model.state_dict()
    assert before.keys() == after.keys()
    assert all(after[key].equal(value) for key, value in before.items())


def test_a_prepared_model_runs_on_the_weights_it_has() -> None:
    """Loaded, cast, copied or replaced afterwards: the fused product never serves old values."""
    ids = tokens(1, 7)

    def logits(model: Any) -> Tensor:
        with torch.no_grad():
            return model(ids).logits

    other = tiny("llama-gqa", seed=5)
    loaded, moved, cast = (prepare_for_inference(tiny("llama-gqa")) for _ in range(3))
    loaded.load_state_dict(other.state_dict())
    steps = steps_of(other)
    assert_same_but_for_rounding(logits(loaded), logits(other), steps=steps)
    copied = copy.deepcopy(moved)
    copied.load_state_dict(other.state_dict())
    assert_same_but_for_rounding(logits(copied), logits(other), steps=steps)
    cast = cast.double()
    cast.model.layers[0].self_attn.q_proj.weight.data.zero_()
    reference = tiny("llama-gqa").double()
    reference.model.layers[0].self_attn.q_proj.weight.data.zero_()
    torch.testing.assert_close(logits(cast), logits(reference))
    replaced = torch.nn.Linear(48, 80, bias=False)
    moved.model.layers[0].mlp.gate_proj = replaced
    stock = tiny("llama-gqa")
    stock.model.layers[0].mlp.gate_proj = replaced
    assert_same_but_for_rounding(logits(moved), logits(stock), steps=steps)


def test_fusing_stores_nothing_twice() -> None:
    model = prepare_for_inference(tiny("llama-gqa"))
    attention = layer_views(model, own=True)[0].attention
    assert attention.fused is not None
    storage = attention.fused.weight.untyped_storage().data_ptr()
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert all(module.weight.untyped_storage().data_ptr() == storage for module in projections)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        (lambda d: d.step(), "prefill"),
        (lambda d: d.prefill(tokens(3, 4)), r"\(2, 1 to 8\)"),
        (lambda d: d.prefill(tokens(2, 9)), r"\(2, 1 to 8\)"),
        (lambda d: d.prefill(tokens(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]])), "pad on the left"),
        (lambda d: d.prefill(tokens(2, 3), torch.tensor([[1, 0, 1], [1, 1, 1]])), "pad on the left"),
        (lambda d: d.generate(tokens(2, 6), 5), "max_length=11"),
        (lambda d: d.seek(8), "no step behind 8"),
    ],
)
def test_what_does_not_fit_is_refused(what: Any, match: str) -> None:
    with pytest.raises(TrisectError, match=match):
        what(Decoder(tiny("llama-gqa"), batch=2, max_length=8))


def test_a_full_cache_is_an_error_not_a_wrong_token() -> None:
    decoder = Decoder(tiny("llama-gqa"), batch=1, max_length=5)
    decoder.prefill(tokens(1, 4))
    decoder.step()
    with pytest.raises(TrisectError, match="larger max_length"):
        decoder.step()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"mode": "graphs"}, "'eager' or 'auto'"),
        ({"mode": "fast"}, "Unknown decoding mode 'fast'.*graphs"),
        ({"bucket": 0}, "bucket of 1"),
        ({"max_length": 1}, "room for 2"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(TrisectError, match=match):
        Decoder(tiny("llama-gqa"), **{"batch": 1, "max_length": 8, **settings})
