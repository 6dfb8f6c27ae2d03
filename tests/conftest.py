"""Fixtures shared by all tests."""

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from numerics import is_repeated

# No test asks the hub for anything: those about it have one of their own on this machine (tests/hub).
os.environ["HF_HUB_OFFLINE"] = "1"
# Nor is anything left in the user's cache, or taken from there; tests/export/test_converted.py has one of its own.
os.environ["TRISECT_GGUF_CACHE"] = "0"

REPOSITORY = Path(__file__).resolve().parents[1]
# The same examples on every machine: what passes here passes there. HYPOTHESIS_PROFILE=default searches anew.
# Nor does a busy machine fail one: how long examples take to make, or to run, is no claim.
settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_repeated(item):
            item.add_marker("numerics")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """A module of experiments/ by its name."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "experiments"))
    return importlib.import_module


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of real data and small models; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("TRISECT_ASSETS") or REPOSITORY.parent / "shared")
    if not (folder / "data").is_dir():
        pytest.skip(f"no assets at {folder}; set TRISECT_ASSETS to the folder that has data/")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text file to calibrate on; folders and files with a text of their own override it."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 30)
    return file
