"""Moments, curves, plans and receipts that somebody else wrote, or tampered with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_seeds import Seeds
from safetensors.torch import load_file, save_file

from tiny_models import tiny, tokens
from trisect.calibrate import READINGS, collect, load_moments, read_info
from trisect.calibrate.store import expected_shape
from trisect.cli import main
from trisect.errors import TrisectError
from trisect.models import shape_of
from trisect.plan import Plan, read_curves
from trisect.support.receipt import read_receipt


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gpt2", "mpt", "qwen2_moe"])
def test_expected_shapes_are_those_of_collected_moments(name: str) -> None:
    model = tiny(name)
    shapes = shape_of(model).layers
    for view, found in collect(model, tokens(2, 8), lambda layer: frozenset(READINGS)):
        assert len(found) > 10
        for moment, tensor in found.items():
            assert tuple(tensor.shape) == expected_shape(moment, shapes[view.index]), moment


def rewritten(seeds: Seeds, path: Path, *, info: Any = None, **changes: torch.Tensor | None) -> Path:
    """The good moments with some of them replaced or left out."""
    tensors = load_file(seeds.root / "moments.safetensors")
    tensors.update({name: tensor for name, tensor in changes.items() if tensor is not None})
    kept = {name: tensor for name, tensor in tensors.items() if name not in changes or changes[name] is not None}
    about = {"fingerprint": seeds.fingerprint, "num_layers": 2, "token_hash": "0", "source": "x", "num_tokens": 3}
    text = json.dumps({**about, **info}) if isinstance(info, dict) else json.dumps(about) if info is None else info
    save_file(kept, path, metadata={"format": "trisect-moments-1", "info": text})
    return path


def load_all(seeds: Seeds, path: Path) -> dict[int, dict[str, torch.Tensor]]:
    return dict(load_moments(path, fingerprint=seeds.fingerprint, layers=seeds.shape.layers))


def test_moments_come_back_as_they_were_written(seeds: Seeds, tmp_path: Path) -> None:
    path = rewritten(seeds, tmp_path / "m.safetensors")
    stored, found = load_file(path), load_all(seeds, path)
    assert {f"{layer}.{name}" for layer in found for name in found[layer]} == set(stored)
    assert all(tensor.equal(stored[f"{n}.{name}"]) for n, layer in found.items() for name, tensor in layer.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"0.q": torch.ones(2, 2, 2).double()}, r"q of layer 0 has the shape \(2, 2, 2\), not \(4, 8, 8\)"),
        ({"0.mlp": torch.full((24,), float("nan")).double()}, "mlp of layer 0 holds NaN"),
        ({"0.mlp": torch.ones(24)}, "'0.mlp' in F32"),
        ({"7.mlp": torch.ones(24).double()}, "'7.mlp'"),
        ({"00.mlp": torch.ones(24).double()}, "'00.mlp'"),
        ({"0.other": torch.ones(24).double()}, "'0.other'"),
        ({"info": {"num_layers": 10**9}}, "another model"),
        ({"info": {"num_layers": True}}, "does not describe"),
        ({"info": {"extra": 1}}, "does not describe"),
        ({"info": {"fingerprint": "x"}}, "another model"),
        ({"info": "[]"}, "does not describe"),
        ({"info": "{"}, "not JSON"),
    ],
)
def test_moments_that_do_not_fit_are_named(seeds: Seeds, tmp_path: Path, changes: Any, message: str) -> None:
    path = rewritten(seeds, tmp_path / "m.safetensors", **changes)
    with pytest.raises(TrisectError, match=message):
        load_all(seeds, path)


def test_moments_that_are_missing_stop_a_compression_with_one_line(
    seeds: Seeds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rewritten(seeds, tmp_path / "m.safetensors", **{"1.mlp": None})
    arguments = ["--moments", str(path), "--method", "a3", "--ratio", "0.3", "--eval", "none", "--align", "none"]
    assert main(["compress", str(seeds.root / "dense"), "-o", str(tmp_path / "out"), *arguments, "-q"]) == 2
    assert "error: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_moments_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"nonsense")
    for path in (tmp_path / "m", tmp_path / "none", tmp_path):
        with pytest.raises(TrisectError, match=str(path)):
            read_info(path)


@pytest.mark.parametrize(
    "row",
    [
        {"layer": -1},
        {"layer": True},
        {"width": 0},
        {"width": "8"},
        {"width": 8.0},
        {"loss": 1e308},
        {"loss": "0.1"},
        {"loss": None},
        {"component": 3},
    ],
    ids=str,
)
def test_impossible_points_of_curves_are_refused(seeds: Seeds, tmp_path: Path, row: dict) -> None:
    data = seeds.json("curves.json")
    data["points"][3].update(row)
    (tmp_path / "c.json").write_text(json.dumps(data))
    with pytest.raises(TrisectError, match=r"c\.json, points\[3\]"):
        read_curves(tmp_path / "c.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": {}}, "layers must be"),
        ({"layers": [3]}, "not 3"),
        ({"layers": [{"qk": "8", "pairs": 4, "vo": 8, "mlp": 8}]}, "qk must be .*not '8'"),
        ({"layers": [{"qk": 8, "pairs": 4, "vo": -8, "mlp": 8}]}, r"layers\[0\]: vo .* not -8"),
        ({"ratio": "x"}, "ratio"),
        ({"ratio": 3}, "ratio"),
        ({"method": None}, "method"),
        ({"align": -1}, "align"),
        ({"masked": "no"}, "masked"),
        ({"linears": [[]]}, "linears for 1"),
        ({"linears": 3}, "linears"),
        ({"linears": [3, 3]}, "not 3"),
        ({"linears": [[{"name": "q", "rank": 0.5}], []]}, "rank must be .*not 0.5"),
    ],
)
def test_impossible_plans_are_refused(seeds: Seeds, change: dict, message: str) -> None:
    good = seeds.json("plan.json")
    assert Plan.from_dict(good).to_dict() == good
    with pytest.raises(TrisectError, match=message):
        Plan.from_dict({**good, **change})


@pytest.mark.parametrize(
    "receipt",
    [
        [],
        {"recipe": []},
        {"recipe": {"calibration": 3}},
        {"recipe": {"method": "a3\n| evil |"}},
        {"source": "org/model\nlicense: evil"},
        {"tuning": 3},
        {"perplexity": {"before": 1}},
        {"perplexity": {"before": {"data": 1, "windows": 1, "length": 1, "perplexity": "x"}}},
    ],
    ids=str,
)
def test_receipts_whose_parts_are_something_else_are_refused(tmp_path: Path, receipt: Any) -> None:
    assert read_receipt(tmp_path) == {}
    (tmp_path / "receipt.json").write_text(json.dumps(receipt))
    with pytest.raises(TrisectError, match=r"receipt\.json is no receipt"):
        read_receipt(tmp_path)


def test_the_receipt_of_a_run_is_read_back(seeds: Seeds) -> None:
    assert read_receipt(seeds.root / "narrow") == seeds.json("narrow/receipt.json")
