"""Pairs that turn at rates of their own: the same logits where these are the model's, and files that last.

References: the stock model; the stock model with another table of frequencies; generation without a cache.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tiny_models import CONFIGS, LLAMA, PLAIN, left_padded, logits, tiny, tokens
from tolerances import assert_same_but_for_rounding, assert_same_model, assert_same_text, steps_of
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.models import layer_views, load_model, read_shape, save_model, shape_of
from trisect.models.heads import loaded_rates, rotation_of, stored_rates
from trisect.models.limits import check_entry
from trisect.pipeline.run import compress

# Without pairs, or with rates that depend on the length of the text or on the type of the layer.
OTHERS = ("mpt", "gpt2", "opt", "phi3-longrope", "gemma3", "olmo3")
ROTATING = [name for name in PLAIN if not name.startswith(OTHERS)]


def rope(kind: str, **settings: Any) -> Callable[[], Any]:
    parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **settings}
    return lambda: transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": 2}, rope_parameters=parameters)


MORE: dict[str, Callable[[], Any]] = {
    "llama-yarn": rope("yarn", original_max_position_embeddings=32),
    "llama-linear": rope("linear"),
    "llama-dynamic": rope("dynamic", original_max_position_embeddings=32),
}


@pytest.fixture(autouse=True)
def more_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, config in MORE.items():
        monkeypatch.setitem(CONFIGS, name, config)


def decoder(model: Any) -> nn.Module:
    return model.get_submodule(layer_views(model)[0].family.layers.rpartition(".")[0])


def spelt_out(model: Any) -> Any:
    """The same model, its pairs' rates written out; what the table multiplies goes into the weights."""
    rotation = rotation_of(decoder(model))
    assert rotation is not None
    for view in layer_views(model):
        part = view.part("qk")
        if part.num_pairs:
            scaled = {name: rotation.scaling * getattr(part, name) for name in ("W_q", "W_k")}
            view.write(replace(part, **scaled, rates=rotation.rates[part.frequencies]))
    return model


@pytest.mark.parametrize("name", [*ROTATING, "llama-yarn", "llama-linear"])
def test_the_models_own_rates_spelt_out_give_the_stock_logits(name: str) -> None:
    stock, ids = tiny(name), tokens(2, 16)
    model, mask = spelt_out(tiny(name)), left_padded(ids)
    assert any(layer.folded for layer in shape_of(model).layers)
    assert_same_but_for_rounding(logits(model, ids), logits(stock, ids), steps=steps_of(model))
    seen = mask.bool()
    padded = logits(model, ids, attention_mask=mask), logits(stock, ids, attention_mask=mask)
    assert_same_but_for_rounding(padded[0][seen], padded[1][seen], steps=steps_of(model))


@pytest.mark.parametrize("name", ["llama-gqa", "helium", "gpt_neox", "mistral-window", "llama-yarn"])
def test_text_behind_a_cache_is_that_of_the_stock_model(name: str) -> None:
    stock, ids = tiny(name), tokens(2, 9)
    model = spelt_out(tiny(name))
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    settings["attention_mask"] = left_padded(ids)
    expected = stock.generate(ids, use_cache=False, **settings)
    for how in ({"use_cache": True}, {"cache_implementation": "static"}):
        found = model.generate(ids, **how, **settings)
        assert_same_text(stock, found, expected, settings["attention_mask"])


def test_rates_that_no_table_has_turn_like_a_table_that_has_them() -> None:
    stock, model, ids = tiny("llama-gqa"), tiny("llama-gqa"), tokens(2, 40)
    rates = torch.rand(8, generator=torch.Generator().manual_seed(0))
    stock.model.rotary_emb.inv_freq.copy_(rates)
    for view in layer_views(model):
        view.write(replace(view.part("qk"), rates=rates.expand(2, -1)))
    assert_same_but_for_rounding(logits(model, ids), logits(stock, ids), steps=steps_of(model))


def test_every_key_head_turns_at_its_own_rates() -> None:
    """Two heads at two sets of rates: each contributes what it does in a model with that set alone."""
    rates = torch.rand(2, 8, generator=torch.Generator().manual_seed(0))
    ids = tokens(1, 20)
    found = {}
    for chosen in ((0, 0), (1, 1), (0, 1)):
        model = tiny("llama-gqa")
        view = layer_views(model)[0]
        heads: list[Tensor] = []

        def listen(tap: str, *heard: Tensor, heads: list[Tensor] = heads) -> None:
            heads.extend(heard[:2] if tap == "rotated" else ())

        view.own().tap = listen
        view.write(replace(view.part("qk"), rates=rates[list(chosen)]))
        logits(model, ids)
        found[chosen] = heads
    for side, group in ((0, 3), (1, 1)):
        expected = torch.cat([found[0, 0][side][:, :, :group], found[1, 1][side][:, :, group:]], dim=2)
        assert found[0, 1][side].equal(expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_the_model_keeps_every_bit_of_the_rates(dtype: torch.dtype) -> None:
    model = spelt_out(tiny("llama-gqa"))
    rates = rotation_of(decoder(tiny("llama-gqa")))
    assert rates is not None
    attention = layer_views(model.to(dtype))[0].attention
    assert attention.rotary_rates is not None
    assert loaded_rates(attention.rotary_rates).double().equal(rates.rates.expand(2, -1))
    assert logits(model, tokens()).isfinite().all()


def test_rates_are_stored_as_the_bits_of_float32() -> None:
    rates = torch.rand(3, 4, dtype=torch.float64)
    stored = stored_rates(rates)
    assert stored.dtype == torch.int32
    assert loaded_rates(stored).equal(rates.float())


def folded(**settings: Any) -> Any:
    model = tiny("llama-gqa", dtype=settings.pop("dtype", None))
    config = CompressConfig(ratio=0.25, method="a3+", align=None, parts=("qk",), rope_scope="layer", **settings)
    compress(model, config, tokens=tokens_from_tensor(tokens(4, 20)))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folded_model_that_is_saved_is_the_one_that_loads(dtype: torch.dtype, tmp_path: Path) -> None:
    model, ids = folded(dtype=dtype), tokens()
    save_model(model, None, tmp_path / "out", receipt={})
    again = load_model(str(tmp_path / "out")).model
    assert again.dtype == dtype
    assert shape_of(again) == shape_of(model)
    assert read_shape(str(tmp_path / "out"))[0] == shape_of(model)
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["trisect"]
    assert entry["format"] == 2
    assert [layer["folded"] for layer in entry["layers"]] == [True] * 3
    assert_same_model(again.float(), model.float(), ids)  # in bfloat16, rounding would hide too much


def test_a_model_without_folds_has_no_word_of_them(tmp_path: Path) -> None:
    model = tiny("llama-gqa")
    compress(model, CompressConfig(ratio=0.25, method="a3", align=None), tokens=tokens_from_tensor(tokens(4, 20)))
    assert model.config.trisect["format"] == 1
    assert all("folded" not in layer for layer in model.config.trisect["layers"])
    assert not any("rotary_rates" in key for key in model.state_dict())


LAYER = {"qk": 12, "pairs": 6, "vo": 16, "mlp": 80}


@pytest.mark.parametrize(("version", "folded"), [(2, "yes"), (2, 1), (2, None), (2, [True]), (1, True), (9, True)])
def test_a_hostile_entry_is_refused(version: int, folded: object) -> None:
    entry = {"format": version, "method": "a3+", "ratio": 0.25, "original": [LAYER]}
    entry["layers"] = [{**LAYER, "folded": folded}]
    with pytest.raises(TrisectError, match=r"config\.json"):
        check_entry(entry)
    check_entry({**entry, "format": 2, "layers": [{**LAYER, "folded": True}]})


def test_weights_without_their_rates_are_an_error_not_a_random_rotation(tmp_path: Path) -> None:
    """A config that says `folded` over a checkpoint that is not."""
    model = tiny("llama-gqa")
    compress(model, CompressConfig(ratio=0.25, method="a3", align=None), tokens=tokens_from_tensor(tokens(4, 20)))
    save_model(model, None, tmp_path / "out", receipt={})
    path = tmp_path / "out" / "config.json"
    data = json.loads(path.read_text())
    data["trisect"]["format"] = 2
    data["trisect"]["layers"] = [{**layer, "folded": True} for layer in data["trisect"]["layers"]]
    path.write_text(json.dumps(data))
    with pytest.raises(TrisectError, match="rotary_rates"):
        load_model(str(tmp_path / "out"))


@pytest.mark.parametrize("name", ["llama-dynamic", "phi3-longrope", "gpt2"])
def test_a_rotation_that_depends_on_length_or_is_none_has_no_rates(name: str) -> None:
    assert rotation_of(decoder(tiny(name))) is None


def test_two_tables_in_one_model_have_no_common_rates() -> None:
    model = tiny("llama-gqa")
    table = model.model.rotary_emb
    assert rotation_of(nn.ModuleList([table])) is not None
    assert rotation_of(nn.ModuleList([table, type(table)(model.config)])) is None


def test_what_a_table_multiplies_is_part_of_the_rotation() -> None:
    model = tiny("llama-yarn")
    rotation = rotation_of(decoder(model))
    assert rotation is not None
    assert rotation.scaling == pytest.approx(model.model.rotary_emb.attention_scaling)
    assert rotation.scaling > 1.1
