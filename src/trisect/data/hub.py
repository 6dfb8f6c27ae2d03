"""The public datasets that trisect knows by a short name: a table, and one loader for all of them.

A local copy is tried first: `$TRISECT_DATA/<name>/<split>.<suffix>`, where split is `calibration`
or `evaluation` and suffix is txt, jsonl, json or parquet. Else `datasets` fetches from the hub.
"""

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit
from urllib.request import getproxies

from trisect.data.files import TEXT_FIELDS, read_documents
from trisect.errors import TrisectError

LOCAL_SUFFIXES = ("txt", "jsonl", "json", "parquet")
CONNECT_SECONDS = 5.0
POOL_CHARACTERS = 8_000_000
"""How much of a web-sized split is read: about a thousand windows of 2048 tokens to draw from."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which part of a dataset to read, and how much of it."""

    name: str
    """The hub's name for it. `datasets` calls every file that is listed by itself `train`."""
    data_files: str | None = None
    max_documents: int | None = None
    max_characters: int | None = None
    """Stop after the document that reaches this many."""

    @property
    def limited(self) -> bool:
        return self.max_documents is not None or self.max_characters is not None


@dataclass(frozen=True, kw_only=True)
class DatasetRecord:
    """Where a dataset is and how its rows become text."""

    description: str
    path: str
    calibration: Split
    evaluation: Split
    config: str | None = None
    revision: str | None = None
    field: str = "text"
    joiner: str = "\n\n"

    def split(self, name: str) -> Split:
        return {"calibration": self.calibration, "evaluation": self.evaluation}[name]


DATASETS: dict[str, DatasetRecord] = {
    "wikitext2": DatasetRecord(
        description="WikiText-2 raw: calibrate on train, evaluate on test",
        path="Salesforce/wikitext",
        config="wikitext-2-raw-v1",
        calibration=Split(name="train"),
        evaluation=Split(name="test"),
    ),
    "c4": DatasetRecord(
        description="C4, English: calibrate on the first train shard, evaluate on validation",
        path="allenai/c4",
        calibration=Split(
            name="train",
            data_files="en/c4-train.00000-of-01024.json.gz",
            max_characters=POOL_CHARACTERS,
        ),
        # 1100 documents joined by a space, as GPTQ, SVD-LLM and their heirs read it; they then stop
        # at 256 windows (--windows 256).
        evaluation=Split(
            name="train",
            data_files="en/c4-validation.00000-of-00008.json.gz",
            max_documents=1100,
        ),
        joiner=" ",
    ),
    "slimpajama": DatasetRecord(
        description="SlimPajama, 6B-token sample: calibrate on train, evaluate on test",
        path="DKYoon/SlimPajama-6B",
        calibration=Split(name="train", max_characters=POOL_CHARACTERS),
        evaluation=Split(name="test", max_characters=POOL_CHARACTERS),
    ),
    "ptb": DatasetRecord(
        description="Penn Treebank, plain text: calibrate on train, evaluate on test",
        path="ptb-text-only/ptb_text_only",
        # The dataset proper is a loading script, which `datasets` no longer runs.
        revision="refs/convert/parquet",
        calibration=Split(name="train", data_files="penn_treebank/train/0000.parquet"),
        evaluation=Split(name="train", data_files="penn_treebank/test/0000.parquet"),
        field="sentence",
    ),
}


def dataset_text(name: str, *, split: str, records: Mapping[str, DatasetRecord] = DATASETS) -> str:
    """The text of one split of a known dataset, from `TRISECT_DATA` if it is there, or the hub."""
    record = records[name]
    local = _local_file(name, split=split)
    if local is not None:
        documents: Iterable[str] = read_documents(local, fields=(record.field, *TEXT_FIELDS))
        return record.joiner.join(_limit(documents, record.split(split)))
    return record.joiner.join(hub_documents(record, name=name, split=split))


def hub_documents(record: DatasetRecord, *, name: str, split: str) -> list[str]:
    """Documents of one split, through `datasets.load_dataset`."""
    import datasets
    from datasets.exceptions import DatasetsError

    part = record.split(split)
    try:
        with _no_retries_when_unreachable(record):
            loaded = datasets.load_dataset(
                record.path,
                record.config,
                data_files=part.data_files,
                split=part.name,
                revision=record.revision,
                streaming=part.limited,  # do not fetch gigabytes to read their beginning
            )
            rows = cast(Iterable[dict[str, str]], loaded)
            return list(_limit((row[record.field] for row in rows), part))
    except (OSError, ValueError, DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise TrisectError(
            f"The dataset {name} ({record.path}) could not be loaded: {reason}. Pass a text file "
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


@contextmanager
def _no_retries_when_unreachable(record: DatasetRecord) -> Iterator[None]:
    """Turn on the hub's offline mode (cache only) if it cannot be reached: half a minute saved."""
    if "/" not in record.path or hub_answers():
        yield
        return
    from datasets import config
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE = before


def hub_answers() -> bool:
    """Whether the hub can be reached; its own libraries would try for half a minute."""
    from huggingface_hub import constants

    if getproxies():  # a direct connection says nothing about a way through a proxy
        return True
    endpoint = urlsplit(constants.ENDPOINT)
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True
