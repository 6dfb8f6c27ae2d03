"""Numbers in the documents are those of the receipts, and math.md and the code know each other's names."""

import ast
import importlib.util
import re
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


LABEL = re.compile(r"\b[A-Z]{1,2}-\d+\b")
SOURCES = sorted((ROOT / "src" / "trisect").rglob("*.py"))
MATHS = (ROOT / "docs" / "math.md").read_text(encoding="utf-8")


def cited(text: str) -> set[str]:
    """Labels behind `math.md` on its line, and in brackets that hold nothing but labels: [E-1, M-1]."""
    behind = re.findall(r"math\.md(.*)", text)
    brackets = re.findall(rf"\[({LABEL.pattern}(?:(?:, | to ){LABEL.pattern})*)\]", text)
    return {label for piece in (*behind, *brackets) for label in LABEL.findall(piece)}


def test_every_label_that_the_code_cites_is_in_the_mathematics() -> None:
    known = set(re.findall(rf"^\*\*({LABEL.pattern})[,.]", MATHS, flags=re.MULTILINE))
    assert {"B-1", "QK-1", "P-4", "E-3", "L-12"} <= known
    found = {label: path.name for path in SOURCES for label in cited(path.read_text(encoding="utf-8"))}
    assert {"P-3", "E-3"} <= found.keys()
    assert not {label: path for label, path in found.items() if label not in known}


def test_a_label_stands_for_one_problem_only() -> None:
    labels = re.findall(rf"^\*\*({LABEL.pattern})[,.]", MATHS, flags=re.MULTILINE)
    assert len(labels) == len(set(labels))


def test_what_the_mathematics_calls_a_solver_is_in_the_code() -> None:
    defined = {
        node.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    clauses = re.findall(r"(?:[Ss]olved|[Bb]uilt|[Rr]ead|[Ss]ummed) by\s+((?:`[\w./]+`[\s,()and]*)+)", MATHS)
    names = {name for clause in clauses for name in re.findall(r"`([\w./]+)`", clause)}
    files = {name for name in names if name.endswith(".py")}
    assert {"band_slots", "compensate", "SlotGrams", "solve/bands.py"} <= names
    assert not [name for name in names - files if name.rpartition(".")[2] not in defined]
    assert not [name for name in files if not (ROOT / "src" / "trisect" / name).exists()]
