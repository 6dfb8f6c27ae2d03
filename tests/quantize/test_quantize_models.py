"""Whole models: every family quantises, and a saved one is the one that was measured."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from quantize_models import dequantised, logits, narrow, need_hqq
from safetensors import safe_open

from tiny_models import CONFIGS, MIXTURES, tiny, tokens
from tolerances import assert_same_but_for_rounding, assert_same_model, steps_of
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.models import layer_views, load_model, read_shape, save_model, shape_of
from trisect.models.linear import QuantizedLinear
from trisect.pipeline.run import compress
from trisect.plan import budget_of
from trisect.quantize import QuantizeConfig, count_bits, quantize_model


@pytest.fixture(autouse=True)
def _hqq() -> None:
    need_hqq()


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in MIXTURES])
def test_every_family_saves_and_loads_with_the_same_logits(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    shape, projections = shape_of(model), sum(len(view.projections()) for view in layer_views(model))
    quantize_model(model, QuantizeConfig(bits=4))
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == projections
    assert shape_of(model) == shape
    here = logits(model)
    assert_same_but_for_rounding(here, logits(dequantised(model)), steps=steps_of(model))
    folder = save_model(model, None, tmp_path / "model", receipt={})
    assert_same_model(load_model(str(folder)).model, model, tokens())
    assert not list(folder.glob("*.bin"))


@pytest.mark.parametrize("name", ["llama-gqa", "mpt", "gpt2", "opt-norm-after"])
def test_eight_bits_hardly_change_the_logits_and_two_change_them_more(name: str) -> None:
    dense = logits(tiny(name))
    off = [
        (logits(quantize_model(tiny(name), QuantizeConfig(bits=bits))) - dense).norm() / dense.norm()
        for bits in (8, 4, 2)
    ]
    assert off[0] < 0.02
    assert off[0] < off[1] < off[2]


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("name", ["llama-biases", "mpt"])
def test_the_bits_that_are_counted_are_the_bytes_of_the_file(name: str, bits: int, tmp_path: Path) -> None:
    model = quantize_model(tiny(name), QuantizeConfig(bits=bits, group_size=16))
    folder = save_model(model, None, tmp_path / "model", receipt={})
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        sizes = {name: (t := file.get_tensor(name)).numel() * t.element_size() for name in file.keys()}  # noqa: SIM118
    header = int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    count = count_bits(model)
    assert count.model_bytes == sum(sizes.values())
    assert count.model_bytes == (folder / "model.safetensors").stat().st_size - 8 - header
    held = [size for name, size in sizes.items() if name.endswith((".packed", ".scale", ".zero"))]
    assert count.decoder_bytes == sum(held)
    # A scale and a zero of 16 bits for every 16 weights.
    assert count.per_weight == count.per_original_weight == bits + 2
    assert count.decoder_weights == budget_of(shape_of(tiny(name))).linear_parameters


def test_experts_stay_whole_and_are_counted_so(tmp_path: Path) -> None:
    model = tiny("qwen2_moe")
    with pytest.raises(TrisectError, match=r"Layer 0 has experts.*--parts qk,ov"):
        quantize_model(model, QuantizeConfig(bits=8))
    quantize_model(model, QuantizeConfig(bits=8, parts=("qk", "ov")))
    budget = budget_of(shape_of(model))
    whole = budget.components["mlp"] / budget.linear_parameters
    assert 8 + 24 * whole < count_bits(model).per_weight < 32  # scales come on top of 8 bits
    folder = save_model(model, None, tmp_path / "model", receipt={})
    assert_same_model(load_model(str(folder)).model, model, tokens())


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2_moe"])
def test_a_dense_model_counts_as_many_bits_as_its_dtype_has(name: str) -> None:
    model = tiny(name, dtype=torch.bfloat16)
    count = count_bits(model)
    assert count.per_weight == count.per_parameter == 16
    assert count.parameters == sum(p.numel() for p in model.parameters())


def test_a_narrow_model_is_counted_per_weight_of_the_dense_one(tmp_path: Path) -> None:
    model = narrow("llama-gqa", ratio=0.35, align=8)
    removed = (
        1 - budget_of(shape_of(model)).linear_parameters / budget_of(shape_of(tiny("llama-gqa"))).linear_parameters
    )
    quantize_model(model, QuantizeConfig(bits=4, group_size=8))
    count = count_bits(model)
    assert removed > 0.3
    assert count.per_weight == 8
    assert math.isclose(count.per_original_weight, 8 * (1 - removed))
    folder = save_model(model, None, tmp_path / "model", receipt={})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert_same_model(loaded, model, tokens())
    now, original, _ = read_shape(str(folder))
    assert now == shape_of(model)
    assert original.layers == shape_of(tiny("llama-gqa")).layers


@pytest.mark.parametrize("name", ["llama-gqa", "phi3"])
@pytest.mark.parametrize("method", ["svd-llm", "palu"])
def test_factors_are_quantised_too(name: str, method: str, tmp_path: Path) -> None:
    settings = {"parts": ("qk", "ov")} if method == "palu" else {}
    config = CompressConfig(ratio=0.3, align=8, method=method, **settings)  # type: ignore[arg-type]
    model = compress(tiny(name), config, tokens=tokens_from_tensor(tokens(4, 40))).model
    quantize_model(model, QuantizeConfig(bits=4))
    here = logits(model)
    assert_same_but_for_rounding(here, logits(dequantised(model)), steps=steps_of(model))
    folder = save_model(model, None, tmp_path / "model", receipt={})
    assert_same_model(load_model(str(folder)).model, model, tokens())


@pytest.mark.parametrize("name", ["llama-gqa", "mpt", "gpt2", "mistral3-wrapper", "opt"])
def test_the_head_is_quantised_when_asked_and_parts_with_the_embedding(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    embedding = model.get_input_embeddings().weight.detach().clone()
    quantize_model(model, QuantizeConfig(bits=8, lm_head=True))
    head = model.get_output_embeddings()
    assert isinstance(head, QuantizedLinear)
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    count = count_bits(model)
    folder = save_model(model, None, tmp_path / "model", receipt={})
    loaded = load_model(str(folder)).model
    assert_same_model(loaded, model, tokens())
    assert count_bits(loaded) == count
    assert count.parameters > budget_of(shape_of(model)).parameters


def test_parts_that_are_not_named_stay() -> None:
    model = quantize_model(tiny("llama-gqa"), QuantizeConfig(parts=("mlp",)))
    inside = {path.split(".")[3] for path, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert inside == {"mlp"}
    assert 8 < count_bits(model).per_weight < 32
    with pytest.raises(TrisectError, match=r"holds maps of qk and of ov: .*--parts ov,qk"):
        quantize_model(tiny("mpt"), QuantizeConfig(parts=("ov",)))


def test_dtype_can_be_changed_while_loading(tmp_path: Path) -> None:
    model = quantize_model(tiny("llama-biases"), QuantizeConfig(bits=4))
    folder = save_model(model, None, tmp_path / "model", receipt={})
    half = load_model(str(folder), dtype="bfloat16").model
    assert logits(half).dtype == torch.bfloat16
    path = "model.layers.1.mlp.down_proj"
    assert torch.equal(half.get_submodule(path).dequantized(), model.get_submodule(path).dequantized())


def test_nothing_is_changed_when_a_group_size_is_refused() -> None:
    model = tiny("llama-gqa")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    # The attention's inputs, 48 and 96, take groups of 48; the MLP's 80 do not.
    with pytest.raises(TrisectError, match=r"48 do not divide the 80 inputs of model\.layers\.0\.mlp\.down_proj"):
        quantize_model(model, QuantizeConfig(group_size=48))
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert type(model) is transformers.LlamaForCausalLM


def test_a_quantised_model_is_neither_quantised_nor_compressed_again() -> None:
    model = quantize_model(tiny("llama-gqa"), QuantizeConfig())
    with pytest.raises(TrisectError, match="is quantised already"):
        quantize_model(model, QuantizeConfig())
    with pytest.raises(TrisectError, match="compressed first and quantised afterwards"):
        compress(model, CompressConfig(ratio=0.3, align=None), tokens=tokens_from_tensor(tokens(4, 40)))


def test_damaged_weights_are_refused() -> None:
    model = tiny("llama-gqa")
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[0, 0] = math.nan
    with pytest.raises(TrisectError, match=r"layers\.2\.mlp\.up_proj holds NaN or inf"):
        quantize_model(model, QuantizeConfig())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: entry.pop("modules"), "quantization.modules is missing"),
        (lambda entry: entry["modules"].update(bad={"bits": 4}), "modules.bad.group_size is missing"),
        (lambda entry: entry["modules"].update({"model.norm": PACKED}), "'model.norm', which is not a linear"),
        (lambda entry: entry["modules"].update({"a.b": PACKED}), "'a.b', which is not a linear"),
        (lambda entry: entry["modules"].update({"lm_head": {**PACKED, "group_size": 7}}), "groups of 7"),
        (
            lambda entry: entry["modules"].update({"lm_head": {**PACKED, "bits": 5}}),
            "lm_head has 5 bits, groups of 16, scales 'float16'; known are bits .8, 4, 3, 2. and",
        ),
        (lambda entry: entry["modules"].update({"lm_head": PACKED}), "no weights for lm_head"),
    ],
)
def test_a_config_that_was_tampered_with_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    model = quantize_model(tiny("llama-gqa"), QuantizeConfig())
    folder = save_model(model, None, tmp_path / "model", receipt={})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["trisect"]["quantization"])
    path.write_text(json.dumps(config))
    with pytest.raises(TrisectError, match=message):
        load_model(str(folder))


PACKED = {"bits": 4, "group_size": 16, "scales": "float16", "symmetric": False}
