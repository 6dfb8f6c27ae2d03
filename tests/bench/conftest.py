"""Scripts of benchmarks/ by their names; receipts do not ask git for the commit, which takes longer than the tests."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.fixture(autouse=True)
def _known_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRISECT_COMMIT", "test")
