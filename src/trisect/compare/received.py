"""Receipts of cells as tables read them: anybody may have written one, so their parts are checked first."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.support.checks import shown

NUMBER = (int, float)
NUMBER_OR_NONE = (int, float, type(None))
"""JSON has no infinity: where a value is null, it was one."""

ALWAYS: dict[tuple[str, ...], tuple[type, ...]] = {
    ("model", "fingerprint"): (str,),
    ("counts", "kv_bytes_per_token"): (int,),
    ("receipt", "hardware", "cpu"): (str,),
    ("receipt", "hardware", "gpu"): (str, type(None)),
    ("receipt", "commit"): (str, type(None)),
}
COMPRESSED: dict[tuple[str, ...], tuple[type, ...]] = {
    ("removed", "of"): (str,),
    ("removed", "chosen"): NUMBER,
    ("removed", "step"): NUMBER_OR_NONE,
    **{("removed", key): NUMBER for key in ("zeros", "decoder", "kv_bytes_per_token", "flops")},
}
"""Where in a receipt a table looks, and what it expects there."""


def check_receipt(receipt: Mapping[str, Any], path: Path, *, dense: bool, texts: int) -> None:
    """Refuse a cell's receipt that a table could not be made from."""
    wrong = _wrong_place(receipt, ALWAYS if dense else {**ALWAYS, **COMPRESSED})
    wrong = wrong or _wrong_list(receipt, texts)
    if wrong:
        raise TrisectError(f"{path} is no receipt: {wrong}; remove it, and its cell is run again.")


def _wrong_place(
    receipt: Mapping[str, Any], places: Mapping[tuple[str, ...], tuple[type, ...]]
) -> str | None:
    for place, kinds in places.items():
        value: Any = receipt
        for key in place:
            if not isinstance(value, Mapping) or key not in value:
                return f"there is no {'.'.join(place)}"
            value = value[key]
        if type(value) not in kinds:
            return f"{'.'.join(place)} is {shown(value)}"
    return None


def _wrong_list(receipt: Mapping[str, Any], texts: int) -> str | None:
    """Perplexities by text, notes, losses by part, scores by task."""
    measured, notes = receipt.get("perplexity"), receipt.get("notes", [])
    if not isinstance(measured, list) or len(measured) != texts:
        return f"perplexity is {shown(measured)}, not a list for {texts} texts"
    rows = {"perplexity": NUMBER_OR_NONE, "token_hash": (str,)}
    if not all(_has(entry, rows) for entry in measured):
        return f"perplexity is {shown(measured)}"
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        return f"notes are {shown(notes)}"
    losses, tasks = receipt.get("losses", {}), receipt.get("tasks", {})
    if not isinstance(losses, dict) or not all(
        _has(x, {"loss": NUMBER, "total": NUMBER}) for x in losses.values()
    ):
        return f"losses are {shown(losses)}"
    scores = tasks.get("scores", {}) if isinstance(tasks, dict) else None
    if not isinstance(scores, dict) or not all(_has(score, {"value": NUMBER}) for score in scores.values()):
        return f"tasks are {shown(tasks)}"
    return None


def _has(entry: Any, kinds: Mapping[str, tuple[type, ...]]) -> bool:
    return isinstance(entry, dict) and all(key in entry and type(entry[key]) in kinds[key] for key in kinds)
