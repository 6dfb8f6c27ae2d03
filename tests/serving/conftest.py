"""Real models, compressed once and kept beside the environment."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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


def _compress(model: str, dense: Path, small: Path, *, assets: Path, allocate: str) -> None:
    """In float32, by a3+ on a few windows: what it costs is not what is tested here."""
    from trisect.config import CalibrationConfig, CompressConfig
    from trisect.models import load_model, save_model
    from trisect.pipeline.run import compress

    loaded = load_model(model, dtype="float32")
    if not dense.exists():
        loaded.model.save_pretrained(dense)
        loaded.tokenizer.save_pretrained(dense)
    text = str(assets / "data" / ("tinystories/tinystories.txt" if "stories" in model else "wikitext-2/valid.txt"))
    calibration = CalibrationConfig(source=text, samples=WINDOWS, length=LENGTH)
    config = CompressConfig(ratio=0.25, method="a3", calibration=calibration, allocate=allocate)
    result = compress(loaded.model, config, tokenizer=loaded.tokenizer)
    save_model(result.model, loaded.tokenizer, small, receipt={})
