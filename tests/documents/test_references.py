"""What documents refer to is there: links, files, tests, equations and solvers; receipts name no machine."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "trisect"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:tests|src|docs|examples|experiments|benchmarks)/[\w./+-]*)(?:::(\w+))?`")
MODULE = re.compile(r"`(?:trisect/)?([a-z]+/[\w/]+\.py)`")
PAGE = re.compile(r"(?<![\w/])(?:docs/)?([\w-]+\.md)(?=[,.;:) #])")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
WRITTEN = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "table.md"}
"""Pages that are no document of docs/, or that a run writes."""


def anchors(path: Path) -> set[str]:
    """Headings as GitHub makes links of them."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_named_files_and_tests_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    prose = FENCE.sub("", text)
    for link in LINK.findall(prose):
        target, _, anchor = link.partition("#")
        if "://" not in link:
            place = path.parent / target if target else path
            assert place.exists(), link
            assert not anchor or anchor in anchors(place), link
    for name, test in NAMED.findall(text):
        assert (ROOT / name).exists(), name
        if test:
            tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
    for name in MODULE.findall(text):
        assert (ROOT / name).is_file() or (PACKAGE / name).is_file(), name
    assert set(PAGE.findall(prose)) <= WRITTEN | {each.name for each in DOCUMENTS}


LABEL = r"[A-Z]{1,2}-\d+"
MATHS = (ROOT / "docs" / "math.md").read_text(encoding="utf-8")
STATED = re.findall(rf"^\*\*({LABEL})[,.]", MATHS, flags=re.MULTILINE)
INDEX = re.compile(r"^\| `(solve/\w+\.py)` \| ((?:`\w+`(?:, )?)+) \| (.+) \|$", flags=re.MULTILINE)
PLACED = re.compile(r"((?:`[\w.]+`(?:,? and |, )?)+)\s+\(`([\w/]+\.py)`")


def names_in(path: Path) -> set[str]:
    """Functions, classes, methods (Class.method) and constants that a file defines."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def test_every_name_with_a_file_behind_it_is_in_that_file() -> None:
    placed = [(n, file) for names, file in PLACED.findall(MATHS) for n in re.findall(r"`([\w.]+)`", names)]
    assert len(placed) > 30
    assert not [(name, file) for name, file in placed if name not in names_in(PACKAGE / file)]


def test_the_index_has_every_public_solver_once_under_a_stated_problem() -> None:
    listed: dict[str, list[str]] = {}
    for file, names, problem in INDEX.findall(MATHS):
        listed.setdefault(file, []).extend(re.findall(r"`(\w+)`", names))
        labels = set(re.findall(rf"\b{LABEL}\b", problem))
        assert labels or "section" in problem, f"{file}: {names} belongs to nothing"
        assert labels <= set(STATED)
    for path in (PACKAGE / "solve").glob("*.py"):
        if path.stem != "__init__":
            public = [name for name in names_in(path) if re.fullmatch(r"[a-z]\w*|[A-Z]\w*[a-z]\w*", name)]
            assert sorted(listed[f"solve/{path.name}"]) == sorted(public)


def test_a_label_stands_for_one_problem_and_the_code_cites_only_those() -> None:
    assert len(STATED) == len(set(STATED)) > 40
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        cited = re.findall(r"math\.md(.*)", text)
        cited += re.findall(rf"\[({LABEL}(?:(?:, | to ){LABEL})*)\]", text)
        assert {label for piece in cited for label in re.findall(rf"\b{LABEL}\b", piece)} <= set(STATED), path


RESULTS = sorted((ROOT / "experiments" / "results").glob("*.json"))
FOLDERS = "work|tmp|root|home|mnt|media|srv|opt|usr|var|etc|data|Users|private|scratch|workspace|content|kaggle"
PLACE = re.compile(rf"(?<![\w.~-])/(?:{FOLDERS})/\w|[A-Za-z]:\\\\|file://")
ADDRESS = re.compile(r"https?://|\b(?!127\.)\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b|\w+@[\w-]+\.\w+")
PEOPLE = {"host", "hostname", "node", "user", "username", "login", "cwd", "home"}


def named_machines(text: str) -> list[str]:
    """Absolute folders and addresses."""
    return [match[0] for pattern in (PLACE, ADDRESS) for match in pattern.finditer(text)]


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys(inner)


def test_no_receipt_names_a_machine_or_a_person() -> None:
    assert RESULTS
    for path in RESULTS:
        text = path.read_text(encoding="utf-8")
        assert not named_machines(text), path.name
        assert not PEOPLE.intersection(keys(json.loads(text))), path.name


@pytest.mark.parametrize("text", ['"/srv/models/a"', "see /var/run/1", "https://x.org", "10.0.0.7", "a@b.org"])
def test_a_machine_is_recognised(text: str) -> None:
    assert named_machines(text)


def test_relative_paths_and_versions_are_no_machine() -> None:
    assert not named_machines('"../shared/data/wikitext-2/test.txt", "2.13.0+cpu", "127.0.0.2", "runs/work/x"')
