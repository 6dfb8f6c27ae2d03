"""docs/math.md and the code name the same things: no function without its equation, no name without code."""

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "trisect"
TEXT = (ROOT / "docs" / "math.md").read_text(encoding="utf-8")
SOLVERS = sorted(path for path in (PACKAGE / "solve").glob("*.py") if path.stem != "__init__")
LABEL = r"[A-Z]{1,2}-\d+"
INDEX = re.compile(r"^\| `(solve/\w+\.py)` \| ((?:`\w+`(?:, )?)+) \| (.+) \|$", flags=re.MULTILINE)
PLACED = re.compile(r"((?:`[\w.]+`(?:,? and |, )?)+)\s+\(`([\w/]+\.py)`")


def public_names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }


def module_of(file: str) -> ModuleType:
    return importlib.import_module("trisect." + file.removesuffix(".py").replace("/", "."))


def test_every_file_that_is_named_exists() -> None:
    files = set(re.findall(r"`([\w/]+\.py)`", TEXT))
    assert {"solve/basis.py", "plan/knapsack.py"} <= files
    assert not [name for name in files if not (PACKAGE / name).is_file()]


def test_every_name_with_a_file_behind_it_is_in_that_file() -> None:
    found = [
        (name, file) for names, file in PLACED.findall(TEXT) for name in re.findall(r"`([\w.]+)`", names)
    ]
    assert ("shared_basis", "solve/basis.py") in found
    assert ("Basis.maps", "solve/basis.py") in found
    assert len(found) > 30
    for name, file in found:
        place = module_of(file)
        for piece in name.split("."):
            assert hasattr(place, piece), f"{file} has no {name}"
            place = getattr(place, piece)


@pytest.mark.parametrize("path", SOLVERS, ids=lambda path: path.name)
def test_every_public_name_of_a_solver_is_in_the_index_once(path: Path) -> None:
    rows = [
        re.findall(r"`(\w+)`", names)
        for file, names, _ in INDEX.findall(TEXT)
        if file == f"solve/{path.name}"
    ]
    listed = [name for row in rows for name in row]
    assert sorted(listed) == sorted(public_names(path))


def test_the_index_points_to_problems_that_are_stated() -> None:
    stated = set(re.findall(rf"^\*\*({LABEL})[,.]", TEXT, flags=re.MULTILINE))
    rows = INDEX.findall(TEXT)
    assert len({file for file, _, _ in rows}) == len(SOLVERS)
    for file, names, problem in rows:
        labels = set(re.findall(rf"\b{LABEL}\b", problem))
        assert labels or "section" in problem, f"{file}: {names} belongs to nothing"
        assert labels <= stated


def test_every_problem_has_a_solver_or_a_file() -> None:
    """Between two labels there is the name of a file or of something that is defined in one."""
    defined = {
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    pieces = re.split(rf"^\*\*({LABEL})[,.]", TEXT, flags=re.MULTILINE)[1:]
    for label, body in zip(pieces[::2], pieces[1::2], strict=True):
        names = re.findall(r"`([\w./]+)`", body)
        known = [name for name in names if name.endswith(".py") or name.split(".")[0] in defined]
        # A problem that is stated before its solution shares the solver with it.
        assert known or label in {"B-1", "B-2", "OV-1", "L-1"}, f"nothing solves {label}"
