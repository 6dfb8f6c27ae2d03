"""The scripts of experiments/, which make the documents."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of experiments/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return importlib.import_module
