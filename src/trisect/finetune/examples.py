"""Tuning data as token ids, each example with the place from which on its tokens are learned."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from trisect.data import load_tokens
from trisect.data.instructions import Instruction, holds_instructions, read_instructions
from trisect.data.mixture import parse_mixture
from trisect.errors import TrisectError
from trisect.finetune.prompts import prompt_of


@dataclass(frozen=True)
class Example:
    """One text to learn from, or the end of it."""

    ids: tuple[int, ...]
    first: int
    """Index of the first token that counts in the loss. No model predicts token 0, so this is 1 or more."""

    @property
    def learned(self) -> int:
        """Tokens that count."""
        return len(self.ids) - self.first


@dataclass(frozen=True, kw_only=True)
class Examples:
    """All examples of a source. The hash stands for their content."""

    items: tuple[Example, ...] = field(repr=False)
    source: str
    kind: str
    """"instructions" or "text"."""
    cut: int = 0
    """Examples that were longer than the length and lost their end."""
    left_out: int = 0
    """Examples of which no response would have been left."""

    @cached_property
    def hash(self) -> str:
        digest = hashlib.sha256()
        for item in self.items:
            digest.update(f"{item.first}:{','.join(map(str, item.ids))};".encode())
        return digest.hexdigest()

    @property
    def learned(self) -> int:
        return sum(item.learned for item in self.items)

    def to_dict(self) -> dict[str, Any]:
        """What a receipt says about the data."""
        return {
            "source": self.source,
            "kind": self.kind,
            "examples": len(self.items),
            "learned_tokens": self.learned,
            "cut": self.cut,
            "left_out": self.left_out,
            "hash": self.hash,
        }


def load_examples(source: str, tokenizer: Any, *, length: int, loss: str) -> Examples:
    """Instructions in Alpaca's form, or windows of any text that `trisect eval` could read."""
    path = Path(source).expanduser()
    if path.is_file() and holds_instructions(path):
        return instruction_examples(
            read_instructions(path), tokenizer, source=source, length=length, loss=loss
        )
    if len(parse_mixture(source)) > 1:
        raise TrisectError(
            f"--data takes one source, not the mixture {source!r}; put the texts into one file."
        )
    tokens = load_tokens(source, tokenizer, samples=None, length=length, sampling="first")
    items = tuple(Example(tuple(row), 1) for row in tokens.ids.tolist())
    return Examples(items=items, source=source, kind="text")


def instruction_examples(
    records: list[Instruction], tokenizer: Any, *, source: str, length: int, loss: str
) -> Examples:
    """Prompts with their responses; what does not fit the length is cut at its end."""
    if tokenizer is None:
        raise TrisectError(
            f"{source} is text, and the model came without a tokenizer: put the tokenizer's files into the "
            "model's folder."
        )
    start = _start_ids(tokenizer)
    whole = [_example(record, tokenizer, start=start, loss=loss) for record in records]
    pairs = [
        (item, Example(item.ids[:length], item.first))
        for item, record in zip(whole, records, strict=True)
        if record.output and item.first < length
    ]
    if not pairs:
        raise TrisectError(
            f"No response of {source} begins within --length {length} tokens; give a greater length, or data "
            "with outputs that are not empty."
        )
    return Examples(
        items=tuple(short for _, short in pairs),
        source=source,
        kind="instructions",
        cut=sum(len(item.ids) > length for item, _ in pairs),
        left_out=len(records) - len(pairs),
    )


def _example(record: Instruction, tokenizer: Any, *, start: list[int], loss: str) -> Example:
    """The response starts where the ids of prompt and response leave those of the prompt alone.

    A token that holds the prompt's last and the response's first letters is therefore learned: the model has
    to say it.
    """
    prompt = prompt_of(record)
    alone, both = (
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        for text in (prompt, prompt + record.output)
    )
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone, both, strict=False)))
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    first = len(start) + shared if loss == "response" else 0
    return Example((*start, *both, *end), max(first, 1))


def _start_ids(tokenizer: Any) -> list[int]:
    """The token that this tokenizer puts before every text, where it does."""
    added = tokenizer("a")["input_ids"][:1]
    return added if added and added[0] == tokenizer.bos_token_id else []
