"""The files of text that a recipe names: made before its run, or missing."""

from dataclasses import asdict
from pathlib import Path

from trisect.calibrate import Progress
from trisect.calibrate.synthetic import receipt_beside, write_synthetic
from trisect.compare.recipe import DerivedText, Recipe, WrittenText
from trisect.data.catalogue import BUILTIN, DATASETS
from trisect.data.load import parse_mixture
from trisect.errors import TrisectError
from trisect.models import load_model
from trisect.support.checks import read_record
from trisect.support.files import after_others, atomic_write_text


def make_texts(recipe: Recipe, *, device: str = "cpu", progress: Progress | None = None) -> None:
    """Make the files of a recipe that are missing or whose source changed."""
    for text in recipe.texts:
        path = Path(text.file)
        if isinstance(text, DerivedText):
            content = _derived(text, Path(recipe.located(text.source)))
            if not path.is_file() or path.read_text(encoding="utf-8") != content:
                atomic_write_text(path, content)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with after_others(Path(f"{text.file}.lock")):  # several processes may run one recipe
            if path.exists():
                _check_written(text, path)
            else:
                _write(text, path, recipe.located(text.by), device=device, progress=progress)


def missing_files(recipe: Recipe) -> list[str]:
    """Files that the recipe names and this machine does not have; data sets are not looked up."""
    names = [text.source for text in recipe.texts if isinstance(text, DerivedText)]
    for model in recipe.models:
        names += [calibration.config.source or BUILTIN for calibration in model.calibrations]
        names += [text.data for text in model.evaluations]
    sources = [part.source for name in names for part in parse_mixture(recipe.located(name))]
    elsewhere = {BUILTIN, *DATASETS, *(text.file for text in recipe.texts)}
    return [name for name in dict.fromkeys(sources) if name not in elsewhere and not Path(name).is_file()]


def _derived(text: DerivedText, path: Path) -> str:
    try:
        whole = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TrisectError(f"{text.file} is made from {text.source}, which cannot be read: {error}.") from error
    documents = [document.strip() for document in whole.split(text.split) if document.strip()]
    return "\n\n".join(documents[text.start :: text.every])


def _write(text: WrittenText, path: Path, model: str, *, device: str, progress: Progress | None) -> None:
    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(f"tokens of {path.name}", done, total)

    loaded = load_model(model, device=device)
    write_synthetic(loaded.model, loaded.tokenizer, text.words, path, name=text.by, progress=report)


def _check_written(text: WrittenText, path: Path) -> None:
    """Refuse a file that was written otherwise: it may be meant for something else."""
    beside = receipt_beside(path)
    known = read_record(beside, what="receipt of a text", instead="remove both") if beside.is_file() else {}
    recipe, asked = known.get("recipe"), {"model": text.by, **asdict(text.words)}
    if not isinstance(recipe, dict) or {name: recipe.get(name) for name in asked} != asked:
        raise TrisectError(
            f"{path} is there, and {beside.name} does not say that {text.by} wrote it with these settings; "
            "remove both, or name another file."
        )
