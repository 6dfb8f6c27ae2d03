"""docs/math.md and the code know each other's names."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


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
