"""Instruction data in Alpaca's form: objects with an instruction, perhaps an input, and an output."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trisect.data.files import TEXT_FIELDS, parsed, read_text
from trisect.errors import TrisectError

SUFFIXES = (".json", ".jsonl")
REQUIRED = ("instruction", "output")
FORM = '{"instruction": "...", "input": "...", "output": "..."}, where input may be left out'


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One task and its answer."""

    instruction: str
    input: str
    """What the task is about; often empty."""
    output: str


def holds_instructions(path: Path) -> bool:
    """Whether a file's first record is an object without a text field, so that no plain text is in it."""
    if path.suffix.lower() not in SUFFIXES:
        return False
    first = next(_records(path), None)
    return first is not None and isinstance(first[1], dict) and not set(TEXT_FIELDS) & set(first[1])


def read_instructions(path: Path) -> list[Instruction]:
    """All records of a .json list or a .jsonl file; the first that is not in the form is named."""
    found = [_instruction(record, where=f"{path}, record {number}") for number, record in _records(path)]
    if not found:
        raise TrisectError(f"{path} holds no records; give objects such as {FORM}.")
    return found


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    """Records with their numbers, from 1 on, blank lines not counted."""
    try:
        text = read_text(path)
    except OSError as error:
        raise TrisectError(f"{path} cannot be read ({error.strerror or error}).") from error
    if text.lstrip().startswith("["):
        yield from enumerate(parsed(text, where=str(path), lines=True), start=1)
        return
    lines = (pair for pair in enumerate(text.split("\n"), start=1) if pair[1].strip())
    for number, (at, line) in enumerate(lines, start=1):
        yield number, parsed(line, where=f"{path}, line {at}")


def _instruction(record: Any, *, where: str) -> Instruction:
    if not isinstance(record, dict):
        raise TrisectError(f"{where}: {type(record).__name__} in place of an object; the form is {FORM}.")
    for field in REQUIRED:
        if field not in record:
            names = ", ".join(map(str, record)) or "none"
            raise TrisectError(
                f"{where}: the field {field!r} is missing (found: {names}); the form is {FORM}."
            )
    fields = {"input": "", **record}
    values = {name: fields[name] for name in (*REQUIRED, "input")}
    for name, value in values.items():
        if not isinstance(value, str):
            raise TrisectError(f"{where}: the field {name!r} is {type(value).__name__}, not a string.")
    return Instruction(**values)
