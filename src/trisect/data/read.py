"""Read files and datasets as documents or as token ids.

The suffix of a file decides; nothing is ever unpickled. Of a dataset a local copy is tried first:
`$TRISECT_DATA/<name>/<split>.<suffix>`, where split is `calibration` or `evaluation` and suffix is txt, jsonl,
json or parquet. Else `datasets` fetches from the hub.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trisect.data.catalogue import DATASETS, DatasetRecord, Split
from trisect.errors import TrisectError
from trisect.support import replaced
from trisect.support.checks import explained, read_text

TEXT_FIELDS = ("text", "content", "story", "sentence")
CHAT_FIELD = "messages"
ID_KEYS = ("input_ids", "tokens")
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
LOCAL_SUFFIXES = ("txt", "jsonl", "json", "parquet")
CONNECT_SECONDS = 5.0
REMEMBERED_SECONDS = 60.0  # whether the hub answers; a run needs many files in a row


def read_file(path: Path, *, tokenizer: Any = None) -> list[str] | Tensor:
    """Documents of a text file, or token ids, (n,) or (n, length), of a .safetensors or .npy.

    Chats are written out by the tokenizer's template, all of a file as one document: a template ends its turns itself.
    """
    suffix = path.suffix.lower()
    if suffix in PICKLES:
        instead = "save the ids with safetensors.torch.save_file({'input_ids': ids}, 'ids.safetensors')"
        raise TrisectError(f"{path} is a pickle, which can run code when opened, so trisect does not: {instead}.")
    if suffix in (".safetensors", ".npy"):
        return read_ids(path)
    if suffix in (".jsonl", ".json") and _is_chat(next(json_entries(path), ("", None))[1]):
        return ["".join(_chat_text(entry, tokenizer, where=where) for where, entry in json_entries(path))]
    return read_documents(path)


def _is_chat(entry: Any) -> bool:
    return isinstance(entry, dict) and CHAT_FIELD in entry and not set(TEXT_FIELDS) & set(entry)


def _chat_text(entry: Any, tokenizer: Any, *, where: str) -> str:
    if not _is_chat(entry):
        every = f"a file of chats has {CHAT_FIELD} in every entry"
        raise TrisectError(f"{where}: {every}; put other texts into another file.")
    if getattr(tokenizer, "chat_template", None) is None:
        instead = 'give one that has (chat_template.jinja in its folder), or text: {"text": "..."}'
        raise TrisectError(f"{where} is a chat, and the model's tokenizer has no chat template; {instead}.")
    with explained(f"{where}: the model's chat template fails on these messages"):
        return str(tokenizer.apply_chat_template(entry[CHAT_FIELD], tokenize=False))


def read_documents(path: Path, *, fields: Sequence[str] = TEXT_FIELDS) -> list[str]:
    """Texts of a .jsonl, .json or .parquet file; any other file is one UTF-8 document."""
    if path.suffix.lower() in (".jsonl", ".json"):
        return [_text_of(entry, where=where, fields=fields) for where, entry in json_entries(path)]
    if path.suffix.lower() != ".parquet":
        return [read_text(path)]
    import pyarrow.parquet

    with explained(f"{path} is not a Parquet file"), pyarrow.parquet.ParquetFile(path) as file:
        field = _field(file.schema_arrow.names, where=str(path), fields=fields)
        column = file.read([field])[field].to_pylist()
    return [_text_of(text, where=str(path), fields=fields) for text in column]


def read_ids(path: Path) -> Tensor:
    """Token ids, (n,) or (n, length), from a .safetensors (input_ids or tokens) or .npy file."""
    if path.suffix.lower() == ".npy":
        import numpy

        with explained(f"{path} is not a plain array of integers, as numpy.save(path, ids) writes it"):
            ids = torch.from_numpy(numpy.load(path, allow_pickle=False))
    else:
        from safetensors import safe_open

        with explained(f"{path} is not a safetensors file"), safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
            key = next((key for key in ID_KEYS if key in names), None)
            if key is None:
                wanted = f"token ids are looked for under {' or '.join(ID_KEYS)}"
                raise TrisectError(f"{path} has the tensors {', '.join(names) or 'none'}; {wanted}.")
            ids = file.get_tensor(key)
    if ids.ndim not in (1, 2) or ids.is_floating_point() or ids.dtype == torch.bool:
        wanted = "token ids are integers of shape (tokens,) or (windows, length)"
        raise TrisectError(f"{path} holds {ids.dtype} of shape {tuple(ids.shape)}; {wanted}.")
    return ids.to(torch.int64)


def json_entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Each entry of a JSON list or of a file of lines, with its place."""
    # C4 and others call a file of lines .json, so the content decides, not the name.
    text = read_text(path)
    if text.lstrip().startswith("["):
        for number, entry in enumerate(_parsed(text, path, line=1), start=1):
            yield f"{path}, entry {number}", entry
        return
    # Not splitlines(): JSON strings may hold U+2028 and its kin raw, which splitlines() would cut.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}, line {number}", _parsed(line, path, line=number)


def _parsed(text: str, path: Path, *, line: int) -> Any:
    """What a file says from a line on."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        form = 'A .jsonl file has one object per line, such as {"text": "..."}; rename plain text to .txt'
        why = f"line {line - 1 + error.lineno}: not JSON ({error.msg}, column {error.colno})"
        raise TrisectError(f"{path}, {why}. {form}.") from error
    except (ValueError, RecursionError) as error:
        raise TrisectError(f"{path}, line {line}: JSON that cannot be read ({str(error)[:100]}).") from error


def _text_of(entry: Any, *, where: str, fields: Sequence[str]) -> str:
    if isinstance(entry, dict):
        entry = entry[_field(entry, where=where, fields=fields)]
    if not isinstance(entry, str):
        form = f"Give objects with one of the fields {', '.join(TEXT_FIELDS)}, or plain strings"
        raise TrisectError(f"{where}: the text is {type(entry).__name__}, not a string. {form}.")
    if any("\ud800" <= letter <= "\udfff" for letter in entry):
        raise TrisectError(f"{where}: the text holds half a letter (a lone surrogate); mend the file.")
    return entry


def _field(present: Iterable[str], *, where: str, fields: Sequence[str]) -> str:
    names = list(present)
    if known := [field for field in fields if field in names]:
        return known[0]
    found = f"{where}: no field with text; found {', '.join(map(str, names)) or 'none'}"
    instead = "Rename the field, or write plain text to a .txt file"
    raise TrisectError(f"{found}, need one of {', '.join(fields)}, or {CHAT_FIELD}. {instead}.")


@contextmanager
def short_patience(*, hub: bool = True) -> Iterator[None]:
    """Fail in seconds: few retries, and of a `hub` that cannot be reached only the cache is read."""
    # `datasets` would also retry for ten minutes to stream from a hub that closes connections.
    from huggingface_hub import constants

    settings: list[tuple[Any, str, Any]] = []
    datasets = sys.modules.get("datasets.config")  # both are there where something is to be streamed
    if datasets is not None:
        settings += [(datasets, f"STREAMING_{what}_MAX_RETRIES", 1) for what in ("READ", "OPEN")]
    streaming = sys.modules.get("huggingface_hub.hf_file_system")
    for name in ("http_backoff", "http_stream_backoff"):
        if hasattr(streaming, name):
            settings.append((streaming, name, partial(getattr(streaming, name), max_retries=2)))
    if hub and not hub_answers():
        settings += [(module, "HF_HUB_OFFLINE", True) for module in (datasets, constants) if module]
    with replaced(*settings):
        yield


def hub_answers() -> bool:
    """Whether the hub can be reached; its own libraries would retry for half a minute."""
    from huggingface_hub import constants

    period = int(time.monotonic() / REMEMBERED_SECONDS)
    return not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT, period)


@lru_cache
def _answers(endpoint: str, period: int) -> bool:
    """Whether one request gets an answer; a proxy that finds nothing behind it says 502 to 504."""
    from huggingface_hub.utils import get_session

    try:
        return bool(get_session().head(endpoint, timeout=CONNECT_SECONDS).status_code < 500)
    except Exception:  # of whichever HTTP library the hub's client uses
        return False


def dataset_text(name: str, *, split: str, records: Mapping[str, DatasetRecord] = DATASETS) -> str:
    """The text of one split of a known dataset, from `TRISECT_DATA` if it is there, or the hub."""
    record = records[name]
    local = _local_file(name, split=split)
    if local is None:
        return record.joiner.join(hub_documents(record, name=name, split=split))
    documents = read_documents(local, fields=(record.field, *TEXT_FIELDS))
    return record.joiner.join(_limit(documents, getattr(record, split)))


def hub_documents(record: DatasetRecord, *, name: str, split: str) -> list[str]:
    """Documents of one split, through `datasets.load_dataset`."""
    import datasets

    part: Split = getattr(record, split)
    local = f"set TRISECT_DATA to a folder that holds {name}/{split}.txt or .jsonl"
    what = f"The dataset {name} ({record.path}) could not be loaded; pass a text file instead, {local}, or, where it "
    what += "is gated, say who you are by `hf auth login`"
    with explained(what), short_patience(hub="/" in record.path):
        # Do not fetch gigabytes to read their beginning.
        some = part.max_documents is not None or part.max_characters is not None
        where: Any = {"data_files": part.data_files, "split": part.name, "revision": record.revision}
        rows: Any = datasets.load_dataset(record.path, record.config, streaming=some, **where)
        return list(_limit(islice((row[record.field] for row in rows), part.skip_documents, None), part))


def _limit(documents: Iterable[str], part: Split) -> Iterator[str]:
    characters = 0
    for document in islice(documents, part.max_documents):
        yield document
        characters += len(document)
        if part.max_characters is not None and characters >= part.max_characters:
            return


def _local_file(name: str, *, split: str) -> Path | None:
    setting = os.environ.get("TRISECT_DATA")
    if not setting:
        return None
    root = Path(setting).expanduser()
    if not root.is_dir():
        instead = f"point it at one that holds {name}/{split}.txt or .jsonl, or unset it"
        raise TrisectError(f"TRISECT_DATA is {setting!r}, which is not a folder: {instead}.")
    candidates = (root / name / f"{split}.{suffix}" for suffix in LOCAL_SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


def can_be_read(name: str) -> bool:
    """Whether a dataset has a local copy to calibrate on, or the hub to come from."""
    return is_local(name) or hub_answers()


def is_local(name: str) -> bool:
    """Whether there is a copy to calibrate on in TRISECT_DATA."""
    return _local_file(name, split="calibration") is not None
