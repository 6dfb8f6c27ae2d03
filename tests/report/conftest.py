"""One tiny run, compressed for real, that the tests of the report read and copy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_runs import make_run


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `trisect compress` writes it; nobody may change it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRISECT_COMMIT", "test")  # asking git takes longer than what is tested
        return make_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def copied(real_run: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the run under a name of its own, with changes to its receipt."""

    def copy(name: str, **changes: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(real_run, folder)
        path = folder / "receipt.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        return folder

    return copy
