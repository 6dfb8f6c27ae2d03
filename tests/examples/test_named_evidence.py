"""What a document names as evidence is there: tests by their names, files and folders by their paths."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("docs/why.md", "docs/extend.md", "docs/migrate.md", "docs/api.md", "CONTRIBUTING.md")
NAMED = re.compile(r"`((?:tests|src|docs|examples|experiments|benchmarks)/[\w./+-]*)(?:::(\w+))?`")
PAGES = re.compile(r"(?<![\w/])(docs/\w+\.md|\w+\.md)(?=[,.;:) #])")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_and_test_that_is_named_exists(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = NAMED.findall(text)
    pages = PAGES.findall(text)
    assert named or pages
    assert not [
        path for path in pages if not (ROOT / path).is_file() and not (ROOT / "docs" / path).is_file()
    ]
    for path, test in named:
        assert (ROOT / path).exists(), path
        if test:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_every_complaint_has_evidence() -> None:
    text = (ROOT / "docs" / "why.md").read_text(encoding="utf-8")
    table = text[text.index("| complaint |") :].strip().splitlines()[2:]
    assert len(table) >= 10
    assert all(NAMED.search(row.split("|")[-2]) for row in table)
