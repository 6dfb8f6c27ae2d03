"""docs/serving.md: its Python block and its request to llama.cpp's server, run on a tiny model."""

import json
import re
import urllib.request
from pathlib import Path

import pytest
from exports import compressed, pieces

from trisect.export import export_gguf
from trisect.export.llama_cpp import LlamaCpp

pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (pip install xllamacpp)")

GUIDE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
SECTION = GUIDE.partition("## llama.cpp")[2].partition("\n## ")[0]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("served") / "model-f16.gguf"
    tokenizer = pieces(vocabulary="ehlowrdtOncupaim")  # all letters of the prompt
    return export_gguf(compressed("llama-gqa", "model-rates"), tokenizer, out).path


def test_the_python_block_prints_a_continuation(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(file.parent)
    block = re.search(r"```python\n(.*?)```", SECTION, re.DOTALL)
    assert block is not None
    found: dict = {}
    exec(block[1].replace("n_ctx = 2048", "n_ctx = 128"), found)
    (choice,) = found["answer"]["choices"]
    assert choice["text"] in capsys.readouterr().out
    assert found["answer"]["usage"]["completion_tokens"] > 0


def test_the_request_is_answered_over_http(file: Path) -> None:
    """The server's own port, in place of the one that llama-server is started with."""
    asked = re.search(r"localhost:8080(\S+) .*-d '(.*)'", SECTION)
    assert asked is not None
    server = LlamaCpp(file, context=128)
    request = urllib.request.Request(
        server.server.listening_address + asked[1], data=asked[2].encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        found = json.load(answer)
    assert found["usage"]["completion_tokens"] > 0
    assert isinstance(found["choices"][0]["text"], str)  # drawn at random: a token may have no text
