"""Model folders from strangers: refused by name before anything is allocated, run or fetched."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fuzz_guard import peak_memory, time_limit

from tiny_models import CONFIGS, tiny
from trisect.cli import main
from trisect.errors import TrisectError
from trisect.models import load_model
from trisect.models.checkpoint import read_shape, reset_invalid_generation_config
from trisect.models.limits import check_config
from trisect.models.source import check_weights, resolve, tensor_files


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "stock"
    tiny("llama-gqa").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(stock: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    (tmp_path / "copy").mkdir()
    for file in stock.iterdir():
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "copy"


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(folder: Path, message: str) -> None:
    with pytest.raises(TrisectError, match=message) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def loads_the_stock_model(folder: Path) -> None:
    """Every weight comes from the files: a model whose files were not found would have random ones."""
    loaded, expected = load_model(str(folder)).model.state_dict(), tiny("llama-gqa").state_dict()
    assert loaded.keys() == expected.keys()
    assert all(loaded[key].equal(tensor) for key, tensor in expected.items())


ABSURD = [
    {"hidden_size": 10**9},
    {"num_hidden_layers": 10**9},
    {"num_hidden_layers": -1},
    {"num_hidden_layers": "3"},
    {"num_hidden_layers": 3.0},
    {"num_hidden_layers": 400},
    {"vocab_size": 10**12},
    {"vocab_size": 0},
    {"intermediate_size": 2**22},
    {"intermediate_size": [80, 10**9, 80]},
    {"num_attention_heads": 10**6},
    {"num_attention_heads": True},
    {"num_attention_heads": 7},
    {"num_key_value_heads": 4},
    {"head_dim": 2**14},
    {"head_dim": {"a": 1}},
    {"num_labels": 10**9},
    {"max_position_embeddings": 10**12},
    {"rope_theta": -1.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e9}},
    {"rope_parameters": {"rope_type": "odd", "rope_theta": 1e4}},
    {"rope_parameters": [1]},
    {"dtype": "load"},
    {"torch_dtype": "int8", "dtype": None},
    {"model_type": "qwen2", "num_hidden_layers": 10**9},
    {"text_config": {"num_hidden_layers": 10**9}},
    {"attn_implementation": "somebody/kernel"},
    {"transformers_weights": "../other.safetensors"},
    {"per_layer_config": {"0": {"intermediate_size": 40}}},
    {"return_dict": False},
    {"trisect": {"format": 1, "layers": []}},
]


@pytest.mark.parametrize("changes", ABSURD, ids=str)
def test_absurd_configs_are_refused_before_anything_is_allocated(folder: Path, changes: dict) -> None:
    edit(folder, **changes)
    before = peak_memory()
    with time_limit(20), pytest.raises(TrisectError, match=r".") as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)
    assert peak_memory() - before < 200 << 20


def test_inspect_refuses_sizes_without_weights_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(folder, num_hidden_layers=10**9)
    assert main(["inspect", str(folder)]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert "num_hidden_layers" in error
    assert "\n" not in error


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_of_every_family_pass(name: str) -> None:
    check_config(json.loads(CONFIGS[name]().to_json_string()), where=name)


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "mistral3-wrapper", "opt-norm-after", "smollm3"])
def test_weights_and_config_that_belong_together_are_loaded(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    model.save_pretrained(tmp_path / "m")
    loaded = load_model(str(tmp_path / "m")).model
    for key, tensor in model.state_dict().items():
        assert loaded.state_dict()[key].equal(tensor)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[" * 100_000, "[]", "", "\xff", '{"hidden_size": NaN}'])
def test_configs_that_are_no_json_are_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    refused(folder, "config")


def test_a_config_that_is_elsewhere_is_refused(folder: Path, stock: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (folder / name).unlink()
        (folder / name).symlink_to(stock / name)
        refused(folder, f"{name} is a link to .* outside its folder")
        (folder / name).unlink()
        (folder / name).write_bytes((stock / name).read_bytes())
    (folder / "chat_template.jinja").symlink_to(folder / "chat_template.jinja")
    refused(folder, "leads nowhere")


def test_links_of_the_hubs_cache_and_to_weights_are_followed(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    loads_the_stock_model(snapshot)


def test_weights_may_lie_on_another_disk(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    loads_the_stock_model(folder)


def test_pipes_and_devices_are_no_files(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    refused(folder, "weights are missing")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")
    refused(folder, "weights are missing")


def test_adapters_are_refused_because_they_load_from_elsewhere(folder: Path, stock: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(stock)}))
    refused(folder, "adapter")


def test_an_index_beside_the_weights_is_not_followed(folder: Path) -> None:
    """transformers reads model.safetensors where both are there, and so do the checks."""
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../../y.safetensors"}}')
    assert set(tensor_files(folder).values()) == {"model.safetensors"}
    loads_the_stock_model(folder)


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "..", "", "a/b.safetensors", "x.bin", 3, None])
def test_an_index_names_safetensors_files_of_its_folder_only(folder: Path, name: Any) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": name}}))
    refused(folder, "points outside its folder|no safetensors file")


def test_a_tensor_that_is_not_in_the_file_the_index_names_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    tiny("llama-gqa").save_pretrained(folder, max_shard_size="40KB")
    index = folder / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    files = sorted(set(data["weight_map"].values()))
    moved = next(name for name, file in data["weight_map"].items() if file == files[0])
    data["weight_map"][moved] = files[1]
    index.write_text(json.dumps(data))
    refused(folder, f"{files[1]} has no {moved}")


def test_generation_settings_that_cannot_be_saved_are_left_out(folder: Path) -> None:
    settings = {"temperature": -3.0, "do_sample": False, "pad_token_id": -5}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model = load_model(str(folder)).model
    model.generation_config.save_pretrained(folder / "again")
    good = transformers.GenerationConfig(do_sample=True, temperature=0.5)
    model.generation_config = good
    reset_invalid_generation_config(model)
    assert model.generation_config is good


@pytest.mark.parametrize("stream", ["off", "on"])
def test_a_head_that_the_files_hold_is_used_whatever_the_config_says(folder: Path, stream: str) -> None:
    edit(folder, tie_word_embeddings=True)
    head = load_model(str(folder), stream=stream).model.lm_head.weight
    assert head.equal(tiny("llama-gqa").lm_head.weight)


def test_names_with_brackets_are_only_names(stock: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = tmp_path / "a[" / "b]:smile:"
    odd.mkdir(parents=True)
    for file in stock.iterdir():
        (odd / file.name).write_bytes(file.read_bytes())
    assert main(["inspect", str(odd)]) == 0
    assert str(odd) in capsys.readouterr().out


def test_error_lines_hold_nothing_a_terminal_would_obey(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(folder, model_type="\x1b[31mred\u202e\n")
    assert main(["inspect", str(folder)]) == 2
    error = capsys.readouterr().err.rstrip("\n")
    assert error.isprintable()


def test_names_that_cannot_be_looked_up_are_refused() -> None:
    for name in ("a" * 5000, "./nowhere"):
        with pytest.raises(TrisectError, match="model at"):
            resolve(name)


def test_what_the_files_hold_is_known_without_reading_them(folder: Path) -> None:
    weights = check_weights(resolve(str(folder)))
    state = tiny("llama-gqa").state_dict()
    assert weights is not None
    assert weights.shapes == {name: tuple(tensor.shape) for name, tensor in state.items()}
    shape, _, _ = read_shape(str(folder))
    assert shape.bytes_per_element == torch.float32.itemsize
