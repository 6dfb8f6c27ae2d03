"""One loader for all datasets of the catalogue.

A local copy is tried first: `$TRISECT_DATA/<name>/<split>.<suffix>`, where split is `calibration`
or `evaluation` and suffix is txt, jsonl, json or parquet. Else `datasets` fetches from the hub.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

from trisect.data.catalogue import DATASETS, DatasetRecord, Split
from trisect.data.files import TEXT_FIELDS, read_documents
from trisect.errors import TrisectError

CONNECT_SECONDS = 5.0
REMEMBERED_SECONDS = 60.0
"""A run asks for many files in a row; whether the hub answers is asked once in a while."""
LOCAL_SUFFIXES = ("txt", "jsonl", "json", "parquet")


@contextmanager
def replaced(*settings: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes have other values inside, each given as (owner, name, value)."""
    before = [getattr(owner, name) for owner, name, _ in settings]
    try:
        for owner, name, value in settings:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(settings, before, strict=True):
            setattr(owner, name, value)


@contextmanager
def short_patience(*, hub: bool = True) -> Iterator[None]:
    """Fail in seconds: where the hub cannot be reached, only its cache is read, without retries.

    `datasets` would also retry for ten minutes to stream from a hub that closes connections. `hub` False:
    what is loaded does not come from there.
    """
    from huggingface_hub import constants

    datasets = sys.modules.get("datasets.config")  # imported by whoever streams
    settings: list[tuple[Any, str, Any]] = []
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

    if constants.HF_HUB_OFFLINE:
        return False
    return _answers(constants.ENDPOINT, int(time.monotonic() / REMEMBERED_SECONDS))


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
    try:
        with short_patience(hub="/" in record.path):
            loaded = datasets.load_dataset(
                record.path,
                record.config,
                data_files=part.data_files,
                split=part.name,
                revision=record.revision,
                # Do not fetch gigabytes to read their beginning.
                streaming=part.max_documents is not None or part.max_characters is not None,
            )
            rows = cast(Iterable[dict[str, str]], loaded)
            texts = islice((row[record.field] for row in rows), part.skip_documents, None)
            return list(_limit(texts, part))
    except Exception as error:  # from every library between here and the wire
        reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        login = " `hf auth login` says who you are." if "gated" in reason else ""
        raise TrisectError(
            f"The dataset {name} ({record.path}) could not be loaded: {reason}.{login} Pass a text file "
            f"instead, or set TRISECT_DATA to a folder that holds {name}/{split}.txt or .jsonl."
        ) from error


def _limit(documents: Iterable[str], part: Split) -> Iterator[str]:
    characters = 0
    for count, document in enumerate(documents, start=1):
        yield document
        characters += len(document)
        if count == part.max_documents:
            return
        if part.max_characters is not None and characters >= part.max_characters:
            return


def _local_file(name: str, *, split: str) -> Path | None:
    setting = os.environ.get("TRISECT_DATA")
    if not setting:
        return None
    root = Path(setting).expanduser()
    if not root.is_dir():
        raise TrisectError(
            f"TRISECT_DATA is {setting!r}, which is not a folder: point it at one that holds "
            f"{name}/{split}.txt or .jsonl, or unset it."
        )
    candidates = (root / name / f"{split}.{suffix}" for suffix in LOCAL_SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)


def can_be_read(name: str) -> bool:
    """Whether a dataset has a local copy to calibrate on, or the hub to come from."""
    return is_local(name) or hub_answers()


def is_local(name: str) -> bool:
    """Whether there is a copy to calibrate on in TRISECT_DATA."""
    return _local_file(name, split="calibration") is not None
