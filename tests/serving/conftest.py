"""Real models, compressed once and kept beside the environment."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "experiments"))
KEPT = Path(os.environ.get("TRISECT_SERVING_MODELS") or REPOSITORY / ".venv-serving" / "models")
WINDOWS, LENGTH = 4, 128

Folders = tuple[Path, Path]
"""A dense model and its compressed one."""


@pytest.fixture(scope="session")
def real(assets: Path) -> Callable[[str], Folders]:
    """A function that gives a real model's folders by its name, such as stories15m, or stories15m/balanced."""

    def folders(name: str) -> Folders:
        base, _, allocate = name.partition("/")
        dense, small = KEPT / base, KEPT / name.replace("/", "-small-")
        small = small if allocate else KEPT / f"{base}-small"
        if not small.exists():
            _compress(source(base, assets), dense, small, assets=assets, allocate=allocate or "uniform")
        return dense, small

    return folders


def source(name: str, assets: Path) -> str:
    """Where a model comes from: the assets, or a package of the Python registry."""
    if name == "gemma-3-270m":
        from gemma import find_gemma

        return str(find_gemma())
    return "smollm2-135m" if name == "SmolLM2" else str(assets / "models" / name)


@pytest.fixture(scope="session")
def stock(assets: Path) -> Callable[[str], Path]:
    """A function that gives a real model's stock export by its name."""

    def folder(name: str) -> Path:
        from trisect.export import export_hf
        from trisect.models import load_model

        small = KEPT / f"{name}-stock"
        if not small.exists():
            loaded = load_model(source(name, assets), dtype="float32")
            parts = ("mlp",) if "moe" in name else ("qk", "ov", "mlp")  # norms of queries keep their width
            model = _compressed(loaded, assets, portable=True, parts=parts)
            export_hf(model, loaded.tokenizer, small, dtype=torch.float32)
        return small

    return folder


def _compress(model: str, dense: Path, small: Path, *, assets: Path, allocate: str) -> None:
    from trisect.models import load_model, save_model

    loaded = load_model(model, dtype="float32")
    if not dense.exists():
        loaded.model.save_pretrained(dense)
        loaded.tokenizer.save_pretrained(dense)
    narrow = _compressed(loaded, assets, method="a3", allocate=allocate)
    save_model(narrow, loaded.tokenizer, small, receipt={})


def _compressed(loaded: Any, assets: Path, **settings: Any) -> Any:
    """In float32, on a few windows: what it costs is not what is tested here."""
    from trisect.config import CalibrationConfig, CompressConfig
    from trisect.pipeline.run import compress

    stories = "stories" in loaded.name
    text = str(assets / "data" / ("tinystories/tinystories.txt" if stories else "wikitext-2/valid.txt"))
    calibration = CalibrationConfig(source=text, samples=WINDOWS, length=LENGTH)
    config = CompressConfig(ratio=0.25, calibration=calibration, **settings)
    return compress(loaded.model, config, tokenizer=loaded.tokenizer).model
