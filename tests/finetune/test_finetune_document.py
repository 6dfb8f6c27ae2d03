"""The figures of docs/finetune.md are those of its receipts."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results"


def test_the_table_says_what_the_receipts_say(script: Callable[[str], ModuleType]) -> None:
    made = script("finetune_smollm2")
    text = made.DOCUMENT.read_text(encoding="utf-8")
    assert list(RESULTS.glob("finetune-*.json"))
    assert made.filled(text) == text, "run `python experiments/finetune_smollm2.py --table`"
