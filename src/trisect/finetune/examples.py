"""What is learned: instructions or windows of text as tokens, and how they lie in a batch."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch.nn.utils.rnn import pad_sequence

from trisect.data import catalogue, load, load_tokens, read
from trisect.errors import TrisectError
from trisect.support.checks import validated

SUFFIXES = (".json", ".jsonl")
FORM = '{"instruction": "...", "input": "...", "output": "..."}, where input may be left out'


class Instruction(BaseModel, strict=True, frozen=True):
    """One task and its answer."""

    instruction: str
    input: str = ""  # what the task is about
    output: str


def holds_instructions(path: Path) -> bool:
    """Whether a file's first record is an object without a text field, so that no plain text is in it."""
    if path.suffix.lower() not in SUFFIXES:
        return False
    _, first = next(read.json_entries(path), (None, None))
    return isinstance(first, dict) and not set(read.TEXT_FIELDS) & set(first)


def read_instructions(path: Path) -> list[Instruction]:
    """All records of a .json list or a .jsonl file; the first that is not in the form is named."""
    entries = enumerate(read.json_entries(path), start=1)
    places = ((record, f"{path}, record {number}") for number, (_, record) in entries)
    found = [validated(Instruction, record, where=where, hint=f"the form is {FORM}") for record, where in places]
    if not found:
        raise TrisectError(f"{path} holds no records; give objects such as {FORM}.")
    return found


PROMPT = """Below is an instruction that describes a task{about}. \
Write a response that appropriately completes the request.

### Instruction:
{instruction}
{context}
### Response:
"""


@dataclass(frozen=True)
class Example:
    """One text to learn from, or the end of it."""

    ids: tuple[int, ...]
    first: int  # index of the first token that counts in the loss. No model predicts token 0, so this is 1 or more.

    @property
    def learned(self) -> int:
        """Tokens that count."""
        return len(self.ids) - self.first


@dataclass(frozen=True, kw_only=True)
class Examples:
    """All examples of a source. The hash stands for their content."""

    items: tuple[Example, ...] = field(repr=False)
    source: str
    kind: str  # "instructions" or "text"
    cut: int = 0  # examples that were longer than the length and lost their end
    left_out: int = 0  # examples of which no response would have been left

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
        named = {name: getattr(self, name) for name in ("source", "kind", "cut", "left_out", "hash")}
        return {**named, "examples": len(self.items), "learned_tokens": self.learned}


def load_examples(source: str, tokenizer: Any, *, length: int, loss: str) -> Examples:
    """Instructions in Alpaca's form, or windows of any text that `trisect eval` could read."""
    path = Path(source).expanduser()
    if path.is_file() and holds_instructions(path):
        return instruction_examples(read_instructions(path), tokenizer, source=source, length=length, loss=loss)
    if len(catalogue.parse_mixture(source)) > 1:
        raise TrisectError(f"--data takes one source, not the mixture {source!r}; put the texts into one file.")
    tokens = load_tokens(source, tokenizer, samples=None, length=length, sampling="first")
    items = tuple(Example(tuple(row), 1) for row in tokens.ids.tolist())
    return Examples(items=items, source=source, kind="text")


def instruction_examples(
    records: list[Instruction], tokenizer: Any, *, source: str, length: int, loss: str
) -> Examples:
    """Prompts with their responses; what does not fit the length is cut at its end."""
    if tokenizer is None:
        raise TrisectError(f"{source} {load.NO_TOKENIZER}.")
    bos = tokenizer("a")["input_ids"][:1]  # the token before every text, for tokenizers that have one
    start = bos if bos == [tokenizer.bos_token_id] else []
    whole = [_example(record, tokenizer, start=start, loss=loss) for record in records if record.output]
    fitting = [item for item in whole if item.first < length]
    if not fitting:
        raise TrisectError(f"No response of {source} begins within --length {length}; give more, or other data.")
    return Examples(
        items=tuple(Example(item.ids[:length], item.first) for item in fitting),
        source=source,
        kind="instructions",
        cut=sum(len(item.ids) > length for item in fitting),
        left_out=len(records) - len(fitting),
    )


def _example(record: Instruction, tokenizer: Any, *, start: list[int], loss: str) -> Example:
    """The response starts where the ids of prompt and response leave those of the prompt alone."""
    # So a token that holds the prompt's last and the response's first letters is learned: the model has to say it.
    about = ", paired with an input that provides further context" if record.input else ""
    context = f"\n### Input:\n{record.input}\n" if record.input else ""
    prompt = PROMPT.format(about=about, context=context, instruction=record.instruction)
    plain = {"add_special_tokens": False, "verbose": False}
    alone, both = (tokenizer(text, **plain)["input_ids"] for text in (prompt, prompt + record.output))
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(alone, both, strict=False)))
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    first = len(start) + shared if loss == "response" else 0
    return Example((*start, *both, *end), max(first, 1))


IGNORED = -100  # the label of a token that does not count


def collate(examples: Sequence[Example]) -> dict[str, Any]:
    """What a model and its loss are given of examples side by side, (b, t), the shorter ones padded at their end."""
    rows = [torch.tensor(example.ids) for example in examples]
    labels = pad_sequence(rows, batch_first=True, padding_value=IGNORED)
    for label, example in zip(labels, examples, strict=True):
        label[: example.first] = IGNORED
    batch = {"input_ids": pad_sequence(rows, batch_first=True), "labels": labels}
    if len({len(row) for row in rows}) > 1:
        batch["attention_mask"] = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return batch
