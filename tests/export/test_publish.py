"""Folders for others. Reference: what LowRankArena's registry reads, and what the hub's library is asked for."""

import csv
import json
import shutil
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from exports import compressed, pieces

from tiny_models import tokens
from trisect.cli import main
from trisect.export import export_arena, export_hf, publish
from trisect.models import save_model

RECEIPT = {
    "source": "meta-llama/Llama-3.1-8B-Instruct",
    "recipe": {"method": "a3+", "seed": 0, "calibration": {"source": "wikitext2", "samples": 256, "length": 2048}},
    "date": "2026-11-18",
}
COLUMNS = "name,model_family,variant,method,source,repo_id,revision,subpath,benchmarks,enabled,notes"
"""The first line of their checkpoints/index.csv."""


def test_an_arena_entry_is_a_checkpoint_a_manifest_and_a_row(tmp_path: Path) -> None:
    native = compressed("llama-gqa", "model-rates")
    done = export_arena(native, pieces(), tmp_path / "entry", dtype=torch.bfloat16, receipt=RECEIPT)
    text = (tmp_path / "entry" / "index.csv").read_text()
    assert text.splitlines()[0] == COLUMNS
    (row,) = csv.DictReader(text.splitlines())
    manifest = json.loads((tmp_path / "entry" / "manifest.json").read_text())
    kept = sum(p.numel() for p in native.model.layers.parameters() if p.ndim == 2)
    kept /= 3 * (48 * 16 * (6 + 2 + 2 + 6) + 3 * 48 * 80)
    assert manifest["ratio"] == pytest.approx(kept, abs=1e-4)
    name = f"llama-3.1-8b-instruct_a3plus_r{round(100 * kept)}"
    assert row["name"] == manifest["id"] == name
    assert row["subpath"] == f"compress/artifacts/{name}/weights"
    assert (row["variant"], row["benchmarks"], row["enabled"]) == ("instruct", "main|speed", "true")
    assert (manifest["precision"], manifest["eval_compatible"], manifest["recovery"]) == ("bf16", True, "none")
    stock = transformers.AutoModelForCausalLM.from_pretrained(done.path, dtype=torch.float32)
    with torch.no_grad():
        apart = (stock(tokens(1, 20)).logits - native(tokens(1, 20)).logits).abs().max()
    assert apart < 0.05 * native(tokens(1, 20)).logits.abs().max()


class Hub:
    """Takes the calls of huggingface_hub.HfApi down."""

    api = huggingface_hub.HfApi

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        real = signature(getattr(Hub.api, name))

        def call(*args: Any, **kwargs: Any) -> Any:
            real.bind(self, *args, **kwargs)  # the library would take it
            self.calls.append((name, {**dict(enumerate(args)), **kwargs}))
            return SimpleNamespace(repo_id="me/small")

        return call


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setattr(publish, "hub_answers", lambda: True)
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native folder and a stock one, for all tests: those that damage one copy it."""
    home, native = tmp_path_factory.mktemp("folders"), compressed("llama-gqa", "model-rates")
    save_model(native, pieces(), home / "native", receipt={})
    export_hf(native, pieces(), home / "stock", dtype=torch.float32)
    return home


@pytest.mark.parametrize("kind", ["native", "stock"])
@pytest.mark.parametrize("public", [False, True])
def test_push_is_private_unless_asked_and_its_card_names_the_repository(
    kind: str, public: bool, folders: Path, hub: Hub
) -> None:
    folder = folders / kind
    assert main(["push", str(folder), "small", *(["--public"] if public else [])]) == 0
    calls = dict(hub.calls)
    assert calls["create_repo"] == {0: "small", "private": not public, "exist_ok": True}
    assert (calls["upload_folder"]["repo_id"], calls["upload_folder"]["folder_path"]) == ("me/small", folder)
    card = calls["upload_file"]["path_or_fileobj"].decode()
    assert 'from_pretrained("me/small")' in card
    assert "THIS_FOLDER" not in card


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("native", "modeling_trisect.py"),
        ("native", "receipt.json"),
        ("stock", "README.md"),
        ("stock", "tokenizer_config.json"),
        ("stock", "model.safetensors"),
    ],
)
def test_what_is_not_complete_is_not_pushed(
    kind: str, lost: str, folders: Path, tmp_path: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(folders / kind, tmp_path / "out")
    (folder / lost).unlink()
    assert main(["push", str(folder), "small"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert not hub.calls


def test_what_the_hub_says_comes_in_one_line(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The library's own check of names comes before any request."""
    monkeypatch.setattr(publish, "hub_answers", lambda: True)
    assert main(["push", str(folders / "stock"), "no/such/name"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: The hub refuses no/such/name:")
    assert error.count("\n") == 1


def test_a_hub_that_cannot_be_reached_is_said(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(publish, "hub_answers", lambda: False)
    assert main(["push", str(folders / "stock"), "small"]) == 2
    assert "cannot be reached" in capsys.readouterr().err
