"""No number stands in README.md or docs/results.md that neither a receipt nor a rule accounts for."""

import ast
from pathlib import Path

import pytest
from orphans import KINDS, measured, orphans

ROOT = Path(__file__).resolve().parents[2]
RECORDS = {
    "log.md": "what was measured on a day, by receipts that later ones replace",
    "math.md": "the paper's figures and its misprints",
}
"""Documents whose figures are not those of today's receipts, and why."""
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))
WRITERS = sorted(
    path
    for pattern in ("*tables.py", "results_*.py", "headline.py", "comparison_claims.py")
    for path in (ROOT / "experiments").glob(pattern)
)


@pytest.mark.parametrize("name", ["README.md", "docs/results.md"])
def test_every_number_is_generated_or_of_a_kind_that_needs_no_receipt(name: str) -> None:
    assert not list(orphans((ROOT / name).read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_no_document_states_a_measured_figure_by_hand(path: Path) -> None:
    if path.name not in RECORDS:
        assert not list(measured(path.read_text(encoding="utf-8")))


def literals(tree: ast.AST) -> list[str]:
    """Text of a script as it may end up on a page: format specifications and docstrings are not text."""
    skipped = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None
        for part in ast.walk(node.format_spec)
    }
    skipped |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped
    ]


def words(path: Path) -> list[str]:
    return [text for text in literals(ast.parse(path.read_text(encoding="utf-8"))) if " " in text]


@pytest.mark.parametrize("path", WRITERS, ids=lambda path: path.name)
def test_what_the_generator_writes_by_itself_holds_no_figure_either(path: Path) -> None:
    assert words(path)
    assert not [line for text in words(path) for line in orphans(text)]


@pytest.mark.parametrize(
    "text",
    [
        "It is 1.7 times faster.",
        "It reaches a perplexity of 12.3.",
        "Perplexity 12.3 was seen.",
        "Streaming takes 1.15 GB.",
        "A layer takes 38 s.",
        "The increase is +4.36.",
        "a3+ has 0.25 of it.",
        "a3+ is two times faster.",
        "It is twice as fast.",
        "| a3 | 19.9 |",
        "A model of 135M tokens.",
        "It falls to 42%.",
        "It was tried on 17 models.",
        "```\ntrisect bench MODEL   # 1.3x as fast\n```",
    ],
)
def test_an_orphan_is_found(text: str) -> None:
    assert list(orphans(f"Something.\n\n{text}\n"))


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table:speed -->\n1.7 times faster\n<!-- end:speed -->",
        "It takes <!-- n: a.json#b|GB -->1.15 GB<!-- /n --> of memory.",
        "Use `--ratio 0.25` at 25%, with Python 3.11 and torch 2.13.0.",
        "```\ntrisect compress MODEL --ratio 0.25 --widths 96/96/11008\n```",
        "SmolLM2-135M, a3+, WikiText-2, an H200, [a page](docs/12.md).",
        "1. one\n2. another",
    ],
)
def test_what_needs_no_receipt_is_let_through(text: str) -> None:
    assert not list(orphans(f"Something.\n\n{text}\n"))


def test_a_figure_in_another_document_is_found_unless_it_is_a_bound() -> None:
    assert list(measured("Decoding is 1.2 times faster, and takes 3.5 GB."))
    assert list(measured("It decodes 1.2x as fast."))
    assert not list(measured("Files over 32 MiB are refused; `--ratio 0.25` works at 25%."))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_no_page_needs_is_no_exception(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody needs lets through what nobody looked at."""
    texts = [text for path in WRITERS for text in words(path)]
    texts += [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/results.md")]
    pages = [path.read_text(encoding="utf-8") for path in DOCUMENTS if path.name not in RECORDS]
    monkeypatch.delitem(KINDS, kind)
    assert any(list(orphans(text)) for text in texts) or any(list(measured(page)) for page in pages)
