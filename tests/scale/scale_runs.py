"""Small runs for the tests of streaming, resuming and sharing the work."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tiny_models import VOCAB
from trisect.config import CalibrationConfig, CompressConfig
from trisect.data import tokens_from_tensor

TOKENS = tokens_from_tensor(torch.randint(3, VOCAB - 2, (18, 24), generator=torch.Generator().manual_seed(3)))


def config(method: str = "a3+", **more: Any) -> CompressConfig:
    """With all that a method can do: what is cut off, streamed or shared out must not depend on it."""
    calibration = CalibrationConfig(**more.pop("calibration", {}))
    settings: dict[str, Any] = {"refine": method == "a3+", **more}
    return CompressConfig(ratio=0.3, method=method, align=None, calibration=calibration, **settings)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a saved folder, in however many files."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
