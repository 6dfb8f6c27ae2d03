"""Numbers in the documents are those of the receipts."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "experiments" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("document", tables().DOCUMENTS, ids=lambda path: path.name)
def test_every_table_says_what_its_receipts_say(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert "<!-- table:" in text
    assert tables().filled(text) == text, "run `python experiments/tables.py`"


def test_receipts_name_no_machine() -> None:
    receipts = sorted((ROOT / "experiments" / "results").glob("*.json"))
    assert receipts
    for path in receipts:
        text = path.read_text(encoding="utf-8")
        assert not any(f'"/{folder}/' in text for folder in ("work", "tmp", "root", "home")), path.name
