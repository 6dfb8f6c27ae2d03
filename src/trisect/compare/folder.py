"""The folder of one recipe's results: receipts, errors, what is cached, and who runs what."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.support.checks import read_record
from trisect.support.files import after_others, atomic_write_text, check_writable, locked, write_json


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Where a recipe's receipts, errors and caches are."""

    path: Path

    @property
    def cache(self) -> Path:
        """Moments and loss curves: large, and made again where they are missing."""
        return self.path / "cache"

    def receipt_path(self, key: str) -> Path:
        return self.path / "cells" / f"{key}.json"

    def error_path(self, key: str) -> Path:
        return self.path / "cells" / f"{key}.error.json"

    def receipt(self, key: str) -> dict[str, Any] | None:
        return _read(self.receipt_path(key))

    def error(self, key: str) -> dict[str, Any] | None:
        return _read(self.error_path(key))

    def keep_receipt(self, key: str, receipt: dict[str, Any]) -> None:
        write_json(self.receipt_path(key), receipt)
        self.error_path(key).unlink(missing_ok=True)

    def keep_error(self, key: str, entry: dict[str, Any]) -> None:
        write_json(self.error_path(key), entry)

    def prepare(self) -> None:
        check_writable(self.path / "cells")
        self.cache.mkdir(parents=True, exist_ok=True)
        # The folder hides itself from git: nobody commits gigabytes of moments by accident.
        atomic_write_text(self.cache / ".gitignore", "*\n")

    @contextmanager
    def claimed(self, key: str) -> Iterator[bool]:
        """Whether a cell is this process's to run: several may work on one recipe, a cell is for one."""
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.cache / f"{key}.lock", "a cell of another process"))
            except TrisectError:
                yield False
            else:
                yield True

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """What many cells share is made by one process, while the others wait for it."""
        with after_others(self.cache / f"{name}.lock"):
            yield


def write_changed(path: Path, data: bytes) -> bool:
    """Write a file unless it already says the same; whether it was written."""
    if path.is_file() and path.read_bytes() == data:
        return False
    atomic_write_text(path, data.decode("utf-8"))
    return True


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    return read_record(path, what="receipt", instead="remove it, and its cell is run again")
