"""A model read layer by layer gives the bytes of one in memory, and can be called like any other."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scale_runs import TOKENS, assert_same, config, weights

import trisect.models.streamed as load_streamed
from tiny_models import CONFIGS, tiny
from tolerances import assert_same_model
from trisect.config import CompressConfig
from trisect.errors import TrisectError
from trisect.methods import METHODS
from trisect.models import fingerprint, load_model, save_model
from trisect.pipeline.loss_curves import measure_curves
from trisect.pipeline.run import compress, compress_within
from trisect.support.distributed import unfinished


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    tiny(getattr(request, "param", "llama-gqa")).save_pretrained(tmp_path / "model", max_shard_size="40KB")
    return tmp_path / "model"


def layer_weights(model: object) -> list[torch.Tensor]:
    return [p for store in [model.layer_store] for layer in store.layers for p in layer.parameters()]


@pytest.mark.parametrize("folder", sorted(CONFIGS), indirect=True)
def test_a_streamed_model_computes_what_the_loaded_one_does(folder: Path) -> None:
    ids = TOKENS.ids[:2]
    whole, streamed = load_model(str(folder)).model, load_model(str(folder), stream="on").model
    assert all(p.is_meta for p in layer_weights(streamed))
    with torch.no_grad():
        assert torch.equal(streamed(input_ids=ids).logits, whole(input_ids=ids).logits)
    assert all(p.is_meta for p in layer_weights(streamed))
    assert fingerprint(streamed) == fingerprint(whole)


@pytest.mark.parametrize(
    ("folder", "settings"),
    [
        *(("llama-gqa", {"method": method}) for method in ("a3", "a3+", "svd-llm", "svd-llm-sequential")),
        ("mixtral", {"method": "a3+"}),
        ("qwen2_moe", {"method": "a3", "drop_experts": True}),
        ("qwen3_moe-all", {"method": "reap", "parts": ("mlp",)}),
    ],
    indirect=["folder"],
)
def test_a_streamed_run_writes_the_bytes_of_one_in_memory(folder: Path, tmp_path: Path, settings: dict) -> None:
    whole = load_model(str(folder)).model
    expected = compress(whole, config(**settings), tokens=TOKENS)
    save_model(expected.model, None, tmp_path / "whole", receipt={})
    streamed = load_model(str(folder), stream="on").model
    with unfinished(tmp_path / "streamed") as work:
        result = compress(streamed, config(**settings), tokens=TOKENS, work=work)
        layers = sorted(work.glob("layer-*"))
        save_model(result.model, None, tmp_path / "streamed", receipt={}, layers=layers)
    assert_same(weights(tmp_path / "streamed"), weights(tmp_path / "whole"))
    assert result.losses == expected.losses
    assert not (tmp_path / "streamed.unfinished").exists()
    assert_same_model(load_model(str(tmp_path / "streamed")).model, expected.model, TOKENS.ids[:1])
    # The streamed model itself reads the finished layers from where they are now.
    assert all(p.is_meta for p in layer_weights(result.model))
    probe, longer = (json.loads((tmp_path / name / "probe.json").read_text()) for name in ("streamed", "whole"))
    assert (probe["prompt"], probe["answer"]) == (longer["prompt"], longer["answer"][:2])
    assert probe["logprobs"] == pytest.approx(longer["logprobs"][:-2], abs=1e-5)


@pytest.mark.parametrize("method", ["a3", "a3+"])
def test_loss_curves_of_a_streamed_model_are_those_of_one_in_memory(folder: Path, method: str) -> None:
    whole, streamed = (
        measure_curves(load_model(str(folder), stream=stream).model, TOKENS, METHODS[method], CompressConfig(ratio=0.3))
        for stream in ("off", "on")
    )
    assert streamed.points == whole.points
    assert streamed.fingerprint == whole.fingerprint


def test_what_needs_all_layers_at_once_says_so(folder: Path) -> None:
    model = load_model(str(folder), stream="on").model
    with pytest.raises(TrisectError, match="backward pass.*--stream off"):
        compress(model, config("fwsvd"), tokens=TOKENS)
    bound = replace(config("a3"), ratio=None, max_ppl_increase="50%")
    with pytest.raises(TrisectError, match="copies.*--stream off"):
        compress_within(model, bound, tokens=TOKENS)


@pytest.mark.parametrize("place", ["device", "host", "disk"])
def test_hidden_states_may_lie_anywhere(place: str) -> None:
    expected = compress(tiny("llama-gqa"), config(), tokens=TOKENS).model
    where = config(calibration={"states": place})
    assert_same(dict(compress(tiny("llama-gqa"), where, tokens=TOKENS).model.state_dict()), dict(expected.state_dict()))


def test_a_damaged_tensor_is_named_with_its_file(folder: Path) -> None:
    model = load_model(str(folder)).model
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    model.save_pretrained(folder, max_shard_size="40KB")
    streamed = load_model(str(folder), stream="on").model
    with pytest.raises(TrisectError, match=r"layers\.1\.mlp\.up_proj\.weight in .*safetensors holds NaN"):
        compress(streamed, config("a3"), tokens=TOKENS)


def test_a_word_that_is_no_way_to_stream_is_refused(folder: Path) -> None:
    with pytest.raises(TrisectError, match="way to stream"):
        load_model(str(folder), stream="maybe")


def test_layers_are_streamed_by_themselves_where_memory_is_short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hasattr(load_model(str(folder), stream="auto").model, "layer_store")
    monkeypatch.setattr(load_streamed, "available_bytes", lambda device: 100_000)
    assert hasattr(load_model(str(folder), stream="auto").model, "layer_store")
