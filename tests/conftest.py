"""Fixtures shared by all tests."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of real data and small models; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("TRISECT_ASSETS") or REPOSITORY.parent / "shared")
    if not (folder / "data").is_dir():
        pytest.skip(f"no assets at {folder}; set TRISECT_ASSETS to the folder that has data/")
    return folder
