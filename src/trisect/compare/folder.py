"""The folder of one recipe's results: receipts, errors, what is cached, and a lock."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.files import atomic_write_text, check_writable, write_json


@dataclass(frozen=True, kw_only=True)
class Folder:
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

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second run out. The system lets go of the lock when this process ends, however it ends."""
        import fcntl

        check_writable(self.path / "cells")
        self.cache.mkdir(parents=True, exist_ok=True)
        # The folder hides itself from git: nobody commits gigabytes of moments by accident.
        atomic_write_text(self.cache / ".gitignore", "*\n")
        with (self.cache / "lock").open("w") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise TrisectError(
                    f"Another run is writing to {self.path}; wait for it, or name another folder with -o."
                ) from error
            yield


def write_changed(path: Path, data: bytes) -> bool:
    """Write a file unless it already says the same; whether it was written."""
    if path.is_file() and path.read_bytes() == data:
        return False
    atomic_write_text(path, data.decode("utf-8"))
    return True


def _read(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise TrisectError(f"{path} is not JSON ({error}); remove it, and its cell is run again.") from error
    if not isinstance(data, dict):
        raise TrisectError(f"{path} is no receipt; remove it, and its cell is run again.")
    return data
