"""Tuning a quantised model: the base stays quantised while adapters learn, and so is what comes out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from tuning import OVERFIT, examples, settings

from quantize.quantize_models import dequantised
from tiny_models import tiny, tokens
from trisect.finetune import finetune
from trisect.finetune.training import attach, logits_of, measure, merge
from trisect.models import load_model, save_model
from trisect.models.linear import QuantizedLinear
from trisect.quantize import QuantizeConfig, quantize_model


def quantized(model: Any, bits: int = 8, backend: str = "hqq") -> Any:
    return quantize_model(model, QuantizeConfig(bits=bits, backend=backend))


def packings(model: nn.Module) -> dict[str, Any]:
    return {n: m.packing for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


@pytest.mark.parametrize(("name", "backend"), [("llama-biases", "hqq"), ("gpt2", "hqq"), ("qwen2", "torchao")])
def test_a_quantised_model_learns_and_stays_quantised(name: str, backend: str, tmp_path: Path) -> None:
    model, data = quantized(tiny(name), backend=backend), examples(3)
    before, held = measure(model, data)["nll"], packings(model)
    assert held
    finetune(model, data, settings(**OVERFIT))
    after = measure(model, data)["nll"]
    assert after < before - 0.05
    now = packings(model)
    assert {n: (p.bits, p.group_size) for n, p in now.items()} == {n: (p.bits, p.group_size) for n, p in held.items()}
    save_model(model, None, tmp_path / "out", receipt={})
    assert measure(load_model(str(tmp_path / "out")).model, data)["nll"] == pytest.approx(after, rel=1e-5)


def test_while_learning_it_equals_adapters_on_the_dequantised_weights() -> None:
    """The oracle is a plain model whose weights are what the quantised one's dequantise to."""
    packed = quantized(tiny("llama-gqa"), 4)
    pair = packed, dequantised(packed)
    losses = [finetune(model, examples(), settings(lr=1e-2, epochs=3))["losses"] for model in pair]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_an_adapter_that_adds_nothing_changes_almost_nothing() -> None:
    model = quantized(tiny("llama-gqa"))
    ids = tokens(2, 9)
    before = logits_of(model, ids)
    merge(attach(model, settings()))
    after = logits_of(model, ids)
    assert float((after - before).abs().max() / before.abs().max()) < 0.05
    assert not any(isinstance(p, nn.Parameter) and "lora" in n for n, p in model.named_parameters())


def test_maps_without_an_adapter_keep_their_bits() -> None:
    model = quantized(tiny("llama-gqa"))
    before = {n: m.packed.clone() for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    finetune(model, examples(3), settings(**OVERFIT, targets=("v",)))
    changed = {n for n, m in model.named_modules() if n in before and not torch.equal(m.packed, before[n])}
    assert changed == {f"model.layers.{i}.self_attn.v_proj" for i in range(3)}
