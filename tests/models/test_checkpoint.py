"""Checkpoints: what is saved is what loads, in this process and in another, and damage is named.

References: the in-memory model; stock AutoModelForCausalLM.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

import trisect
from narrow_models import narrow
from tiny_models import CONFIGS, logits, tiny, tokens
from tolerances import assert_same_but_for_rounding, assert_same_model, assert_same_text, steps_of
from trisect.errors import TrisectError
from trisect.models import load_model, original_shape, read_shape, save_model, shape_of

OTHER_PROCESS = """
import sys, torch, transformers, trisect
from pathlib import Path
from safetensors.torch import save_file
ids, found = torch.tensor(eval(sys.argv[2])), {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found[folder.name + ".logits"] = model(ids).logits
    text = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    found[folder.name + ".text"] = text
save_file(found, sys.argv[3])
"""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_folder_loads_through_auto_classes_with_the_same_logits(name: str, tmp_path: Path) -> None:
    model, ids = narrow(name), tokens()
    save_model(model, None, tmp_path / "out", receipt={"a": 1})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert_same_model(again, model, ids)
    assert shape_of(again) == shape_of(model)
    assert json.loads((tmp_path / "out" / "receipt.json").read_text()) == {"a": 1}


def test_another_process_gets_the_same_logits_and_text(tmp_path: Path) -> None:
    ids, models = tokens(), {name: narrow(name) for name in ("llama-gqa", "smollm3", "mpt")}
    for name, model in models.items():
        save_model(model, None, tmp_path / "models" / name, receipt={})
    found = tmp_path / "found.safetensors"
    # One process for all: most of its time is spent on starting.
    command = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path / "models"), str(ids.tolist()), str(found)]
    subprocess.run(command, check=True, timeout=300)
    with safe_open(found, framework="pt") as file:
        for name, model in models.items():
            there, here = file.get_tensor(f"{name}.logits"), logits(model, ids)
            assert_same_but_for_rounding(there, here, steps=steps_of(model))
            text = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
            assert_same_text(model, file.get_tensor(f"{name}.text"), text)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_survives_saving_and_loading(dtype: torch.dtype, tmp_path: Path) -> None:
    model = narrow("llama-gqa", dtype=dtype)
    save_model(model, None, tmp_path / "out", receipt={})
    loaded = load_model(str(tmp_path / "out")).model
    assert loaded.dtype == dtype
    assert loaded.model.layers[0].self_attn.rotary_index.dtype == torch.int16


def test_the_api_round_trips(tmp_path: Path) -> None:
    config = trisect.CompressConfig(ratio=0.5, method="a3", align=None)
    model = trisect.compress(tiny("llama-gqa"), config=config, calibration=tokens(4, 40))
    trisect.save(model, tmp_path / "out")
    again = trisect.load(tmp_path / "out")
    assert_same_model(again, model, tokens())
    assert json.loads((tmp_path / "out" / "receipt.json").read_text())["recipe"]["ratio"] == 0.5


def test_shapes_are_read_from_the_config_alone(tmp_path: Path) -> None:
    model = narrow("llama-gqa")
    save_model(model, None, tmp_path / "out", receipt={})
    now, before, info = read_shape(str(tmp_path / "out"))
    assert now == shape_of(model)
    assert before == original_shape(model)
    assert before.layers == shape_of(tiny("llama-gqa")).layers
    assert info["family"] == "llama"
    assert info["method"] == "a3"


def stock_folder(tmp_path: Path, **kwargs: Any) -> Path:
    tiny("llama-gqa").save_pretrained(tmp_path / "stock", **kwargs)
    return tmp_path / "stock"


def refused(folder: Path | str, message: str) -> None:
    with pytest.raises(TrisectError, match=message) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = stock_folder(tmp_path, max_shard_size="40KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    refused(folder, f"{shard.name} is missing")


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    folder = stock_folder(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(folder, r"model.safetensors is damaged")


def test_an_index_that_points_outside_its_folder_is_refused(tmp_path: Path) -> None:
    folder = stock_folder(tmp_path, max_shard_size="40KB")
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    data["weight_map"] = dict.fromkeys(data["weight_map"], "../secret.safetensors")
    index.write_text(json.dumps(data))
    refused(folder, "points outside its folder")


def test_a_pickle_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = stock_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"pickled weights \(pytorch_model.bin\)")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "fp8"])
def test_a_quantised_checkpoint_is_refused_before_its_weights_are_read(method: str, tmp_path: Path) -> None:
    folder = stock_folder(tmp_path)
    edit(folder / "config.json", quantization_config={"quant_method": method})
    refused(folder, rf"quantised \({method}\): use the original weights")


def test_more_heads_than_weights_is_an_error_not_a_random_model(tmp_path: Path) -> None:
    folder = stock_folder(tmp_path)
    edit(folder / "config.json", num_attention_heads=12)
    refused(folder, r"q_proj|does not fit|size mismatch|ignore_mismatched")


def test_more_layers_than_weights_is_an_error_not_a_random_model(tmp_path: Path) -> None:
    folder = stock_folder(tmp_path)
    edit(folder / "config.json", num_hidden_layers=4)
    refused(folder, r"no weights for model.layers.3")


def test_remote_code_is_not_run_unless_asked(tmp_path: Path) -> None:
    folder = stock_folder(tmp_path)
    edit(folder / "config.json", model_type="mystery", auto_map={"AutoConfig": "evil.Config"})
    (folder / "evil.py").write_text("raise SystemExit('remote code ran')\n")
    refused(folder, r"--trust-remote-code")


def test_a_gguf_file_of_noise_is_refused(tmp_path: Path) -> None:
    noise = tmp_path / "noise.gguf"
    noise.write_bytes(b"not a model at all")
    refused(noise, "noise.gguf, damaged or cut short: GGUF magic invalid")
    noise.write_bytes(b"GGUF" + bytes(range(200)))
    refused(noise, "Cannot (read|load)")


def test_a_folder_without_a_model_says_what_to_give(tmp_path: Path) -> None:
    refused(tmp_path, "no config.json")
    refused(tmp_path / "nowhere", "There is no model at")


def test_a_damaged_plan_is_refused(tmp_path: Path) -> None:
    save_model(narrow("llama-gqa"), None, tmp_path / "out", receipt={})
    path = tmp_path / "out" / "config.json"
    entry = json.loads(path.read_text())["trisect"]
    for damage in (
        {**entry, "format": 99},
        {**entry, "layers": entry["layers"][:1]},
        {**entry, "layers": [{**layer, "qk": -4} for layer in entry["layers"]]},
        {**entry, "layers": [{"qk": 4}] * 3},
        "nonsense",
    ):
        edit(path, trisect=damage)
        refused(tmp_path / "out", "config.json")


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_output_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    model = narrow("llama-gqa")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("keep me")
    with pytest.raises(TrisectError, match="exists and is not empty"):
        save_model(model, None, tmp_path / "out", receipt={})
    assert [file.name for file in tmp_path.rglob("*")] == ["out", "precious.txt"]
