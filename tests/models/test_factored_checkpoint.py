"""Factored and masked checkpoints: what is saved is what loads, here and elsewhere, and damage is named.

References: the in-memory model; the config alone.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from factoring import apply, factors, mixed
from safetensors import safe_open

from tiny_models import STORED, logits, tiny, tokens
from tolerances import assert_same_but_for_rounding, assert_same_model, steps_of
from trisect.errors import TrisectError
from trisect.models import (
    fingerprint,
    layer_views,
    load_model,
    mark_compressed,
    original_widths,
    read_shape,
    save_model,
    shape_of,
    zeros_of,
)
from trisect.records.parts import Masked

OTHER_PROCESS = """
import sys, torch, transformers, trisect
from pathlib import Path
from safetensors.torch import save_file
ids, found = torch.tensor(eval(sys.argv[2])), {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    with torch.no_grad():
        found[folder.name] = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits
save_file(found, sys.argv[3])
"""


def save(model: Any, folder: Path, *, original: Any = None) -> Path:
    original = original or original_widths(model)
    mark_compressed(model, original=original, method="svd", ratio=0.5)
    return save_model(model, None, folder, receipt={})


@pytest.mark.parametrize("name", STORED)
def test_a_factored_model_loads_with_the_same_logits_and_shape(name: str, tmp_path: Path) -> None:
    model, ids = mixed(name), tokens()
    folder = save(model, tmp_path / "out")
    for again in (transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), load_model(str(folder)).model):
        assert_same_model(again, model, ids)
        assert shape_of(again) == shape_of(model)


@pytest.mark.slow
def test_another_process_gets_the_same_logits_of_every_family(tmp_path: Path) -> None:
    ids = tokens()
    models = {name: mixed(name) for name in STORED}
    for name, model in models.items():
        save(model, tmp_path / "models" / name)
    found = tmp_path / "found.safetensors"
    command = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path / "models"), str(ids.tolist()), str(found)]
    subprocess.run(command, check=True, timeout=600)
    with safe_open(found, framework="pt") as file:
        for name, model in models.items():
            there, here = file.get_tensor(name), logits(model, ids)
            assert_same_but_for_rounding(there, here, steps=steps_of(model))


@pytest.mark.parametrize("name", STORED)
def test_narrow_layers_can_be_factored_too(name: str, tmp_path: Path) -> None:
    model, ids = tiny(name), tokens()
    original = original_widths(model)
    for view in layer_views(model):
        apply(view, q=3)  # beside a factored map of the same fused module, components are still written
        ov, mlp = view.part("ov"), view.part("mlp")
        b_v = None if ov.b_v is None else ov.b_v[:, :12]
        view.write(replace(ov, W_v=ov.W_v[..., :12], W_o=ov.W_o[:, :12], b_v=b_v))
        b_up, b_gate = (None if b is None else b[:50] for b in (mlp.b_up, mlp.b_gate))
        W_gate = None if mlp.W_gate is None else mlp.W_gate[:, :50]
        view.write(replace(mlp, W_up=mlp.W_up[:, :50], W_down=mlp.W_down[:50], W_gate=W_gate, b_up=b_up, b_gate=b_gate))
        apply(view, v=5, up=6, per_head=True)
    folder = save(model, tmp_path / "out", original=original)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert_same_model(again, model, ids)
    assert shape_of(again) == shape_of(model)
    shape = shape_of(again).layers[0]
    assert (shape.vo, shape.mlp, len(shape.linears)) == (12, 50, 3)


def test_shapes_are_read_from_the_config_alone(tmp_path: Path) -> None:
    model = mixed("gpt_neox")
    (save(model, tmp_path / "out") / "model.safetensors").unlink()
    now, before, _ = read_shape(str(tmp_path / "out"))
    assert now == shape_of(model)
    assert before == shape_of(tiny("gpt_neox"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_survives_factoring_saving_and_loading(dtype: torch.dtype, tmp_path: Path) -> None:
    model = mixed("phi3", dtype=dtype)
    loaded = load_model(str(save(model, tmp_path / "out"))).model
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert loaded.state_dict().keys() == model.state_dict().keys()


def test_masked_weights_just_save_in_the_old_format(tmp_path: Path) -> None:
    model, ids = tiny("gpt2"), tokens()
    for view in layer_views(model):
        for name in view.linears():
            W = view.linear(name).W
            view.apply(Masked(name=name, W=W.where(W > 0, 0.0), loss=0.0, total=0.0))
    folder = save(model, tmp_path / "out")
    again = load_model(str(folder)).model
    assert zeros_of(again) == zeros_of(model) > 0
    assert_same_model(again, model, ids)
    entry = json.loads((folder / "config.json").read_text())["trisect"]
    assert entry["format"] == 1
    assert not any("linears" in layer for layer in entry["layers"])


def test_damaged_entries_of_factored_maps_are_refused(tmp_path: Path) -> None:
    path = save(mixed("gpt2"), tmp_path / "out") / "config.json"
    config = json.loads(path.read_text())
    entry = config["trisect"]
    assert entry["format"] == 2
    good = entry["layers"][0]["linears"][0]
    assert good == {"name": "k", "rank": 5, "groups": 3, "cached": True}
    for linears in (
        "k",
        {"k": good},
        ["k"],
        [{"name": "k"}],
        [{**good, "more": 1}],
        [{**good, "name": "gate"}],
        [{**good, "name": "c_attn"}],
        [{**good, "name": ["k"]}],
        [{**good, "rank": 0}],
        [{**good, "rank": -5}],
        [{**good, "rank": 5.0}],
        [{**good, "rank": True}],
        [{**good, "rank": 10**12}],
        [{**good, "groups": 0}],
        [{**good, "groups": 7}],
        [{**good, "cached": "yes"}],
        [{**good, "name": "q"}],
        [good, good],
    ):
        layers = [{**entry["layers"][0], "linears": linears}, *entry["layers"][1:]]
        refused(path, {**config, "trisect": {**entry, "layers": layers}})
    refused(path, {**config, "trisect": {**entry, "format": 1}})


def refused(path: Path, config: Any) -> None:
    path.write_text(json.dumps(config))
    with pytest.raises(TrisectError, match=r"config\.json") as caught:
        load_model(str(path.parent))
    assert "\n" not in str(caught.value)


def test_ranks_that_differ_from_the_weights_are_an_error_not_a_random_model(tmp_path: Path) -> None:
    path = save(mixed("llama-gqa"), tmp_path / "out") / "config.json"
    config = json.loads(path.read_text())
    config["trisect"]["layers"][0]["linears"][0]["rank"] = 4
    path.write_text(json.dumps(config))
    with pytest.raises(TrisectError, match=r"narrow|does not fit|mismatch"):
        load_model(str(path.parent))


def test_the_fingerprint_sees_factors() -> None:
    model = tiny("llama-gqa")
    dense = fingerprint(model)
    view = layer_views(model)[0]
    view.apply(factors(view.linear("v"), groups=2))
    factored = fingerprint(model)
    with torch.no_grad():
        view.module("v").wide.weight += 1
    assert len({dense, factored, fingerprint(model)}) == 3
