"""Texts that a compressed model is measured on: held out of calibration, and one that took no part in it."""

from typing import Any

from torch import Tensor

from trisect.data import Tokens, tokens_from_tensor
from trisect.data.catalogue import BUILTIN, OTHER_TEXTS
from trisect.data.hub import can_be_read
from trisect.data.load import decoded_bytes, tokenize
from trisect.data.sources import has_two_parts, read_source
from trisect.data.tokens import windows
from trisect.errors import TrisectError
from trisect.texts import Prepared, Text

TOO_SHORT = "is too short to hold anything out, so nothing is measured on it; --eval FILE names another text"


def held_out_texts(
    prepared: Prepared, tokenizer: Any, *, count: int, other: bool = True
) -> tuple[list[Tokens], list[str]]:
    """Up to `count` windows of each text of a calibration, and what there is to say of those without any.

    With `other`, also of a text that took no part in the calibration.
    """
    length = prepared.calibration.length
    assert length is not None
    found, notes = [], []
    for text in {text.source: text for text in prepared.texts}.values():
        try:
            ids = _held_out(text, tokenizer, count=count, length=length)
        except TrisectError as error:
            notes.append(f"Nothing is measured on held-out {text.name}. {error}")
            continue
        if len(ids):
            found.append(_named(f"held-out {text.name}", ids, tokenizer if text.is_text else None))
        else:
            notes.append(f"{text.name} {TOO_SHORT}.")
    if other and tokenizer is not None:
        found += _other_text({text.source for text in prepared.texts}, tokenizer, count=count, length=length)
    return found, notes


def _held_out(text: Text, tokenizer: Any, *, count: int, length: int) -> Tensor:
    """Windows of a known text's own evaluation part, or of what calibration left of a file."""
    if not has_two_parts(text.source):
        return text.apart.held_out(count, length=length)
    return _evaluation_windows(text.source, tokenizer, count=count, length=length)


def _other_text(taken: set[str], tokenizer: Any, *, count: int, length: int) -> list[Tokens]:
    """The first text that took no part and can be read; none is no reason to stop."""
    for name in OTHER_TEXTS:
        if name in taken or not (name == BUILTIN or can_be_read(name)):
            continue
        try:
            ids = _evaluation_windows(name, tokenizer, count=count, length=length)
        except TrisectError:
            continue
        if len(ids):
            return [_named(name, ids, tokenizer)]
    return []


def _evaluation_windows(name: str, tokenizer: Any, *, count: int, length: int) -> Tensor:
    """The first windows of a known text's evaluation part, as many as there are up to `count`."""
    content = read_source(name, split="evaluation")
    assert isinstance(content, str)
    ids = tokenize(content, tokenizer, source=name)
    found = min(count, len(ids) // length)
    if found == 0:
        return ids[:0].reshape(0, length)
    return windows(ids, samples=found, length=length, sampling="first", seed=0, source=name)


def _named(name: str, ids: Tensor, tokenizer: Any) -> Tokens:
    text_bytes = None if tokenizer is None else decoded_bytes(ids, tokenizer)
    return tokens_from_tensor(ids, name, text_bytes=text_bytes)
