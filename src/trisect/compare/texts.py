"""Texts that a recipe makes before its run: from documents of another, or by a model itself."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trisect.calibrate import Progress
from trisect.calibrate.synthetic import SampleConfig, receipt_beside, write_synthetic
from trisect.compare.entries import at_place, check_keys, count_of, text_of
from trisect.errors import TrisectError
from trisect.models import load_model
from trisect.support.checks import read_record
from trisect.support.files import after_others, atomic_write_text

ASSETS = "../shared/"
"""How recipes name the assets, so that receipts say the same on every machine."""
WORDS = ("samples", "length", "temperature", "seed", "batch_size")


@dataclass(frozen=True, kw_only=True)
class DerivedText:
    """A file made before the run from a part of another, so that two sets of tokens never share a story."""

    file: str
    source: str
    split: str
    """What stands between the documents of the source."""
    every: int = 1
    start: int = 0
    """Documents start, start + every, ... are taken."""

    def __post_init__(self) -> None:
        _check_file(self.file, ".txt")


@dataclass(frozen=True, kw_only=True)
class WrittenText:
    """A file that a model writes before the run (docs/sample.md)."""

    file: str
    by: str
    words: SampleConfig

    def __post_init__(self) -> None:
        _check_file(self.file, ".jsonl")


def read_text(data: Any, at: str) -> DerivedText | WrittenText:
    """An entry of `texts`: one with `by` is written, the others are derived."""
    with at_place(at):
        if isinstance(data, dict) and "by" in data:
            check_keys(data, ("file", "by", *WORDS), required=("file", "by"))
            words = SampleConfig(**{name: data[name] for name in WORDS if name in data})
            return WrittenText(file=text_of(data, "file"), by=text_of(data, "by"), words=words)
        check_keys(data, ("file", "from", "split", "every", "start"), required=("file", "from", "split"))
        return DerivedText(
            file=text_of(data, "file"),
            source=text_of(data, "from"),
            split=text_of(data, "split"),
            every=count_of(data, "every", 1, minimum=1) or 1,
            start=count_of(data, "start", 0, minimum=0) or 0,
        )


def make_texts(
    texts: tuple[DerivedText | WrittenText, ...], *, device: str = "cpu", progress: Progress | None = None
) -> None:
    """Make the files of a recipe that are not there yet, or that say something else than they should."""
    for text in texts:
        path = Path(text.file)
        if isinstance(text, DerivedText):
            content = _derived(text)
            if not path.is_file() or path.read_text(encoding="utf-8") != content:
                atomic_write_text(path, content)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with after_others(Path(f"{text.file}.lock")):  # several processes may share a recipe
            _write(text, path, device=device, progress=progress)


def located(name: str) -> str:
    """The same source where TRISECT_ASSETS says the assets are."""
    elsewhere = os.environ.get("TRISECT_ASSETS")
    return name.replace(ASSETS, f"{elsewhere.rstrip('/')}/") if elsewhere else name


def _write(text: WrittenText, path: Path, *, device: str, progress: Progress | None) -> None:
    if path.exists():
        _check_written(text, path)
        return
    loaded = load_model(located(text.by), device=device)
    told = None if progress is None else lambda done, total: progress(f"tokens of {path.name}", done, total)
    write_synthetic(loaded.model, loaded.tokenizer, text.words, path, name=text.by, progress=told)


def _check_written(text: WrittenText, path: Path) -> None:
    """Refuse a file that somebody wrote in another way: it may have been meant for something else."""
    beside = receipt_beside(path)
    known = read_record(beside, what="receipt of a text", instead="remove both") if beside.is_file() else {}
    recipe, asked = known.get("recipe"), {"model": text.by, **asdict(text.words)}
    if not isinstance(recipe, dict) or {name: recipe.get(name) for name in asked} != asked:
        raise TrisectError(
            f"{path} is there, and {beside.name} does not say that {text.by} wrote it with these settings; "
            "remove both, or name another file."
        )


def _derived(text: DerivedText) -> str:
    path = Path(located(text.source))
    try:
        whole = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TrisectError(
            f"{text.file} is made from {text.source}, which cannot be read: {error}."
        ) from error
    documents = [document.strip() for document in whole.split(text.split) if document.strip()]
    return "\n\n".join(documents[text.start :: text.every])


def _check_file(name: str, suffix: str) -> None:
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or path.suffix != suffix:
        raise TrisectError(f"{name!r} would be written: name a {suffix} file below the current folder.")
