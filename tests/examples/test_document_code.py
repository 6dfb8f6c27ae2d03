"""Every Python block in the documents runs, in order, one namespace per document, on a tiny random model.

Blocks name their model `MODEL` and their text `TEXT`. A model that is no folder here, as in the README, is
the tiny one too; windows are few and short, whatever a block asks for.
"""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import trisect.api
import trisect.calibrate.texts

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "docs/api.md", "docs/extend.md", "docs/migrate.md")
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
WINDOWS, LENGTH = 8, 32


@pytest.fixture
def small_world(
    checkpoint: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """The names that blocks may use; in an empty folder, with small models and texts for all others."""
    load_model, load_tokens, prepare = (
        trisect.api.load_model,
        trisect.api.load_tokens,
        trisect.calibrate.texts.prepare,
    )

    def tiny_model(name: str, **settings: Any) -> Any:
        return load_model(name if Path(name).is_dir() else str(checkpoint), **settings)

    def tiny_tokens(source: Any, tokenizer: Any, **settings: Any) -> Any:
        known = not isinstance(source, str) or Path(source).is_file()
        samples = min(settings.pop("samples") or WINDOWS, WINDOWS)
        length = min(settings.pop("length"), LENGTH)
        cut = partial(load_tokens, tokenizer=tokenizer, samples=samples, length=length)
        return cut(source if known else str(text), **settings)

    def tiny_text(model: Any, config: Any, tokenizer: Any, **settings: Any) -> Any:
        asked = config.calibration
        known = all(Path(part.split(":")[0]).is_file() for part in (asked.source or "").split("+"))
        sizes = {
            "samples": min(asked.samples or WINDOWS, WINDOWS),
            "length": min(asked.length or LENGTH, LENGTH),
        }
        asked = replace(asked, source=asked.source if known else str(text), **sizes)
        return prepare(model, replace(config, calibration=asked), tokenizer, **settings)

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(trisect.api, "load_model", tiny_model)
    monkeypatch.setattr(trisect.api, "load_tokens", tiny_tokens)
    monkeypatch.setattr(trisect.calibrate.texts, "prepare", tiny_text)
    return {"__name__": "document", "MODEL": str(checkpoint), "TEXT": str(text)}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_code_in_a_document_runs(document: str, small_world: dict[str, Any]) -> None:
    content = (ROOT / document).read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(content))
    assert blocks, f"{document} has no Python in it"
    for block in blocks:
        line = content.count("\n", 0, block.start(1))
        code = compile("\n" * line + block[1], document, "exec")  # so that errors name the document's line
        exec(code, small_world)


def test_every_public_function_is_shown() -> None:
    content = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    functions = [name for name in trisect.api.__all__ if name[0].islower()]
    assert {"compress", "solve", "summary"} <= set(functions)
    code = "\n".join(block[1] for block in BLOCK.finditer(content))
    assert not [name for name in functions if not re.search(rf"\b(?:trisect|api)\.{name}\(", code)]
    assert not [name for name in functions if not getattr(trisect.api, name).__doc__]
