"""From the rows of a task file to documents with the fields of the dataset that lm-eval's task reads.

So lm-eval's own templates make the prompts. Each function below takes the fields of one row; what it
cannot read (a missing field, a wrong type) it reports by raising KeyError, TypeError or ValueError.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trisect.data.task_files import Place, Row, first_present, read_rows
from trisect.errors import TrisectError

Fields = dict[str, Any]
LETTERS = "ABCDEFGH"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A place, and how its rows become documents."""

    place: Place
    convert: Callable[[Fields], Fields]


@dataclass(frozen=True, kw_only=True)
class Documents:
    """What one split holds: documents by subset ("" where the task has only one)."""

    subsets: dict[str, list[Fields]]
    origin: str
    sha256: str
    """Of the documents as JSON: the same for every file that holds the same documents."""


def read_documents(sources: Sequence[Source]) -> Documents:
    """Documents of the first source that is here; all sources of a split hold the same ones."""
    place = first_present([source.place for source in sources])
    convert = next(source.convert for source in sources if source.place == place)
    subsets: dict[str, list[Fields]] = {}
    for row in read_rows(place):
        subsets.setdefault(row.subset, []).append(_document(row, convert))
    if not subsets:
        raise TrisectError(f"{place} holds no question; fetch the file again.")
    text = json.dumps(subsets, sort_keys=True, ensure_ascii=True)
    return Documents(subsets=subsets, origin=str(place), sha256=hashlib.sha256(text.encode()).hexdigest())


def _document(row: Row, convert: Callable[[Fields], Fields]) -> Fields:
    try:
        return convert(row.fields)
    except KeyError as error:
        found = ", ".join(row.fields) or "none"
        raise TrisectError(
            f"{row.where}: no field {error.args[0]!r} (found: {found}); fetch the file again."
        ) from error
    except (TypeError, ValueError) as error:
        raise TrisectError(f"{row.where}: {error}; fetch the file again.") from error


def arc_from_requests(fields: Fields) -> Fields:
    """ARC: the package has the prompt, which starts and ends in fixed words."""
    question = _between(_text(fields, "query"), "Question: ", "\nAnswer:")
    return {"question": question, **_lettered(fields)}


def arc_from_arrow(fields: Fields) -> Fields:
    return {name: fields[name] for name in ("question", "choices", "answerKey")}


def boolq_from_requests(fields: Fields) -> Fields:
    """SuperGLUE's BoolQ, whose passages start with a title: llm-foundry's file has none."""
    passage, mark, question = _between(_text(fields, "query"), "", "?\nAnswer:").rpartition("\nQuestion: ")
    if not mark:
        raise ValueError("no line 'Question: ...' in the query")
    choices, gold = _choices(fields)
    return {"passage": passage, "question": question, "label": int(choices[gold] == "yes")}


def openbookqa_from_foundry(fields: Fields) -> Fields:
    return {"question_stem": _text(fields, "query"), **_lettered(fields)}


def openbookqa_from_requests(fields: Fields) -> Fields:
    stem = _between(_text(fields, "query"), "Question: ", "\nAnswer:")
    return {"question_stem": stem, **_lettered(fields)}


def openbookqa_from_arrow(fields: Fields) -> Fields:
    return {name: fields[name] for name in ("question_stem", "choices", "answerKey")}


def winogrande_from_foundry(fields: Fields) -> Fields:
    """The options are what the two contexts do not share, from the start of a word."""
    contexts, gold = _choices(fields, "context_options")
    shared = os.path.commonprefix(contexts).rfind(" ") + 1
    option1, option2 = (context[shared:] for context in contexts)
    return _gap(contexts[0][:shared], option1, option2, _text(fields, "continuation"), str(gold + 1))


def winogrande_from_arrow(fields: Fields) -> Fields:
    before, mark, after = _text(fields, "sentence").partition("_")
    if not mark:
        raise ValueError("the sentence has no gap ('_')")
    return _gap(before, fields["option1"], fields["option2"], after, fields["answer"])


def _gap(before: str, option1: str, option2: str, after: str, answer: str) -> Fields:
    # lm-eval strips what follows the gap, so the spaces there are nobody's: one, always.
    sentence = f"{before}_ {after.strip()}"
    return {"sentence": sentence, "option1": option1, "option2": option2, "answer": answer}


def gsm8k_from_foundry(fields: Fields) -> Fields:
    answer = f"{_text(fields, 'chain_of_thought')}\n#### {_text(fields, 'answer')}"
    return {"question": _text(fields, "context"), "answer": answer}


def gsm8k_from_requests(fields: Fields) -> Fields:
    return {"question": _text(fields, "question"), "answer": _text(fields, "answer")}


def lambada_from_foundry(fields: Fields) -> Fields:
    """llm-foundry cut the text at its last space, as lm-eval does."""
    last = _text(fields, "continuation")
    if not last or " " in last:
        raise ValueError(f"the continuation {last!r} is not one word")
    return {"text": f"{_text(fields, 'context')} {last}"}


def unchanged(fields: Fields) -> Fields:
    return fields


def _text(fields: Fields, name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {type(value).__name__}, not a string")
    return value


def _choices(fields: Fields, name: str = "choices") -> tuple[list[str], int]:
    choices, gold = fields[name], fields["gold"]
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise TypeError(f"{name} is not a list of strings")
    if type(gold) is not int or not 0 <= gold < len(choices) <= len(LETTERS):
        raise ValueError(f"gold is {gold!r}, with {len(choices)} choices")
    return choices, gold


def _lettered(fields: Fields) -> Fields:
    choices, gold = _choices(fields)
    labels = list(LETTERS[: len(choices)])
    return {"choices": {"text": choices, "label": labels}, "answerKey": labels[gold]}


def _between(text: str, start: str, end: str) -> str:
    if not text.startswith(start) or not text.endswith(end):
        raise ValueError(f"the query is not {start!r} ... {end!r}")
    return text[len(start) : len(text) - len(end)]
