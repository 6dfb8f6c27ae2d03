"""The figures of docs/finetune.md are those of its receipts."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_says_what_the_receipts_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    script = importlib.import_module("finetune_smollm2")
    text = script.DOCUMENT.read_text(encoding="utf-8")
    assert list((ROOT / "experiments" / "results").glob("finetune-*.json"))
    assert script.filled(text) == text, "run `python experiments/finetune_smollm2.py --table`"
