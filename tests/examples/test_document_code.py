"""Every Python block in the documents runs, in order, one namespace per document, on a tiny random model.

Blocks name their model `MODEL` and their text `TEXT`. The README's own names are there as well: a folder
`path/to/llama`, and a local copy of `wikitext2`.
"""

import re
from pathlib import Path
from typing import Any

import pytest

import trisect.api

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "docs/api.md", "docs/extend.md", "docs/migrate.md")
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def names(checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What blocks may use, in an empty folder."""
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/llama").symlink_to(checkpoint)
    copies = tmp_path / "data" / "wikitext2"
    copies.mkdir(parents=True)
    for part in ("calibration", "evaluation"):
        (copies / f"{part}.txt").symlink_to(text)
    monkeypatch.setenv("TRISECT_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return {"__name__": "document", "MODEL": str(checkpoint), "TEXT": str(text)}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_code_in_a_document_runs(document: str, names: dict[str, Any]) -> None:
    content = (ROOT / document).read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(content))
    assert blocks, f"{document} has no Python in it"
    for block in blocks:
        line = content.count("\n", 0, block.start(1))
        code = compile("\n" * line + block[1], document, "exec")  # so that errors name the document's line
        exec(code, names)


def test_every_public_function_is_shown() -> None:
    content = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    functions = [name for name in trisect.api.__all__ if name[0].islower()]
    assert {"compress", "solve", "summary"} <= set(functions)
    code = "\n".join(block[1] for block in BLOCK.finditer(content))
    assert not [name for name in functions if not re.search(rf"\b(?:trisect|api)\.{name}\(", code)]
