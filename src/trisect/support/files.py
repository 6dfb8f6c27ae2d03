"""Files that are whole or not there: written beside their name, then renamed."""

import errno
import glob
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError


def atomic_write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it."""
    with new_file(path) as partial:
        partial.write_bytes(data)


def atomic_write_text(path: str | Path, text: str) -> None:
    """`atomic_write_bytes` for UTF-8 text."""
    atomic_write_bytes(path, text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """Write JSON atomically. Numbers that JSON cannot hold (infinity, NaN) become null."""
    atomic_write_text(path, json.dumps(plain(value), indent=2, allow_nan=False) + "\n")


@contextmanager
def new_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling path; on success it becomes `path`, otherwise it is removed."""
    path = Path(path).resolve()
    if path.is_dir():
        raise TrisectError(f"Cannot write the file {path}: a folder has that name; give a file name.")
    partial = _partial_name(path)
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.touch()
            usual = partial.stat().st_mode
            yield partial
            partial.chmod(usual)
            _sync(partial)
            os.replace(partial, path)
            _sync(path.parent)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary sibling folder; on success it becomes `path`, otherwise it is removed."""
    path = Path(path).resolve()
    check_new_folder(path)
    partial = _partial_name(path)
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        try:
            yield partial
            # safetensors writes files that only their owner can read; a checkpoint is to be shared.
            usual = partial.stat().st_mode
            for entry in (*sorted(partial.rglob("*")), partial):
                entry.chmod(usual if entry.is_dir() else usual & 0o666)
                _sync(entry)
            os.rename(partial, path)  # replaces an empty folder, and only that
            _sync(path.parent)
        finally:
            if partial.exists():
                shutil.rmtree(partial)


@contextmanager
def locked(path: Path, refusal: str | None = None) -> Iterator[None]:
    """Keep a second process out, or waiting where no `refusal` is given, until this one leaves or ends."""
    import fcntl

    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
        except OSError as error:
            raise TrisectError(refusal or str(error)) from error
        # The run before may have removed the file between our opening and locking it.
        if refusal and (not path.exists() or path.stat().st_ino != os.fstat(handle.fileno()).st_ino):
            raise TrisectError(refusal)
        yield


def remove_leftovers(path: str | Path) -> None:
    """Remove what a process that was killed while writing `path` left beside it."""
    path = Path(path).resolve()
    for partial in path.parent.glob(f".{glob.escape(path.name)}.partial-*"):
        remove(partial)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def check_new_folder(path: str | Path) -> None:
    """Refuse an output folder that is taken or cannot be made: before the long work, not after."""
    path = Path(path).resolve()
    if path.exists() and not path.is_dir():
        raise TrisectError(f"The output {path} is a file; name a new folder with -o.")
    if path.is_dir() and any(path.iterdir()):
        raise TrisectError(f"The output folder {path} exists and is not empty; name another with -o, or remove it.")
    check_writable(path)


def check_writable(path: str | Path) -> None:
    """Refuse an output whose folder cannot be written to."""
    try:
        home = existing_parent(path)
        Path(path).exists()
    except OSError as error:
        raise TrisectError(f"Cannot write {str(path)[:200]}: {error.strerror}; name another place.") from error
    if not home.is_dir():
        raise TrisectError(f"Cannot write {path}: {home} is a file, not a folder; name another place.")
    if not os.access(home, os.W_OK | os.X_OK):
        raise TrisectError(f"Cannot write {path}: {home} is not writable; name another place.")


def check_disk_space(path: str | Path, needed: int) -> None:
    """Refuse work whose output of `needed` bytes will not fit where `path` is."""
    free = shutil.disk_usage(existing_parent(path)).free
    if free < needed:
        unit, name = (1e9, "GB") if needed >= 1e9 else (1e6, "MB")
        few = f"{path} needs {needed / unit:.1f} {name}, but only {free / unit:.1f} {name} are free there"
        raise TrisectError(f"{few}; make room or name another place.")


def existing_parent(path: str | Path) -> Path:
    """The nearest folder above `path` that is there."""
    return next(parent for parent in Path(path).resolve().parents if parent.exists())


def _partial_name(path: Path) -> Path:
    # Not tempfile: its private permissions would stay on the finished file.
    return path.parent / f".{path.name}.partial-{secrets.token_hex(4)}"


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals that a user can fix into a TrisectError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TrisectError(f"The disk is full, {path} was not written; make room.") from error
        # Reading something else inside the block may fail too; that is not about this output.
        ours = error.filename is not None and str(error.filename).startswith(str(path.parent))
        if ours and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise TrisectError(f"Cannot write {path}: {error.strerror}; name another place.") from error
        raise


def plain(value: Any) -> Any:
    """A value as JSON can hold it: keys are text; infinity and NaN are null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value
