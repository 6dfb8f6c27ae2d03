"""Run a recipe: its texts are made, then each cell is run at most once; one that fails leaves the others alone."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from trisect.calibrate import Progress
from trisect.calibrate.synthetic import receipt_beside, write_synthetic
from trisect.compare.measure import ModelRun, chosen_weights
from trisect.compare.outcomes import Folder
from trisect.compare.recipe import Cell, DerivedText, Recipe, WrittenText, allocation, cells_of
from trisect.data import REGISTRY_MODELS
from trisect.data.catalogue import BUILTIN, DATASETS, cache_folder
from trisect.data.load import parse_mixture
from trisect.errors import TrisectError, check_names
from trisect.methods import get_method
from trisect.models import load_model, read_shape
from trisect.plan import apply_plan, budget_of, plan_for
from trisect.records.shapes import ModelShape
from trisect.support.checks import read_record
from trisect.support.files import after_others, atomic_write_text, write_json
from trisect.support.receipt import package_commit, package_version

log = logging.getLogger(__name__)


@dataclass
class RunCounts:
    """What a run did with its cells, some by their keys."""

    total: int = 0
    """To run."""
    done: int = 0
    """That had a receipt already."""
    ran: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    elsewhere: int = 0
    """That another process is running or has just run."""


def run_recipe(
    recipe: Recipe,
    folder: Folder,
    *,
    device: str = "cpu",
    only: Sequence[str] = (),
    keep_errors: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> RunCounts:
    """Run every cell that has no receipt yet; with `keep_errors`, not those that failed before either."""
    check_only(recipe, only)
    folder.prepare()
    wanted = [cell for cell in {c.key: c for c in cells_of(recipe)}.values() if _chosen(recipe, cell, only)]
    missing = [cell for cell in wanted if not folder.receipt_path(cell.key).exists()]
    if keep_errors:
        missing = [cell for cell in missing if not folder.error_path(cell.key).exists()]
    counts = RunCounts(total=len(missing), done=len(wanted) - len(missing))
    if missing:
        make_texts(recipe, device=device, progress=progress)
    for model in recipe.models:
        cells = [cell for cell in missing if cell.model == model]
        if cells:
            run = ModelRun(recipe, model, folder=folder, device=device, progress=progress, say=say)
            _run_model(run, cells, counts)
    return counts


def check_only(recipe: Recipe, only: Sequence[str]) -> None:
    """Refuse a method or model that the recipe does not have."""
    known = {word for cell in cells_of(recipe) for word in _words(cell)}
    check_names("method or model of this recipe", only, known)


def _chosen(recipe: Recipe, cell: Cell, only: Sequence[str]) -> bool:
    """The dense model belongs to every choice of methods: increases are against it."""
    models = {model.name for model in recipe.models}.intersection(only)
    methods = set(only) - models
    return (not models or cell.model.name in models) and (
        not methods or cell.method is None or not methods.isdisjoint(_words(cell))
    )


def _words(cell: Cell) -> set[str]:
    """What a cell goes by: its model, and its method by name and label."""
    return {cell.model.name} | ({cell.method.name, cell.method.label} if cell.method else set())


def _run_model(run: ModelRun, cells: Sequence[Cell], counts: RunCounts) -> None:
    try:
        run.say(f"loading {run.model.name}")
        run.loaded  # noqa: B018, a model that cannot be loaded fails all its cells at once
    except Exception as error:
        for cell in cells:
            _fail(run, cell, error, counts)
        return
    for cell in cells:
        with run.folder.claimed(cell.key) as mine:
            if not mine or run.folder.receipt_path(cell.key).exists():
                counts.elsewhere += 1
                continue
            number = len(counts.ran) + len(counts.failed) + 1
            run.say(f"cell {number} of {counts.total}: {cell.describe()}")
            try:
                run.folder.keep_receipt(cell.key, run.run(cell))
                counts.ran.append(cell.key)
            except Exception as error:  # whatever it is, the other cells are worth having
                _fail(run, cell, error, counts)
        run.release()


def _fail(run: ModelRun, cell: Cell, error: Exception, counts: RunCounts) -> None:
    message = explain(error, run.recipe)
    if not isinstance(error, TrisectError):
        log.warning("an error that is not the recipe's fault:", exc_info=error)
    run.say(f"failed: {cell.describe()}: {message}")
    entry = {
        "model": cell.model.source,
        "method": cell.label,
        "config": None if cell.config is None else cell.config.to_dict(),
        "error": message,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "trisect": package_version("trisect"),
        "commit": package_commit(),
    }
    write_json(run.folder.error_path(cell.key), entry)
    counts.failed.append(cell.key)


def explain(error: Exception, recipe: Recipe) -> str:
    """An error on one line that names no machine: assets as the recipe has them, other paths from here."""
    kind = "" if isinstance(error, TrisectError) else f"{type(error).__name__}: "
    text, here = " ".join(f"{kind}{error}".split()), Path.cwd()
    written, place = recipe.assets or ("", "/")
    names = {place: written, str(here): ".", str(here.parent): "..", str(Path.home()): "~"}
    for path, name in names.items():
        if path != "/":
            text = text.replace(path, name)
    return text[:500]


@dataclass(frozen=True, kw_only=True)
class PlannedCell:
    """A cell, and what is known of it before it runs."""

    cell: Cell
    state: str
    """done, failed before, or to run."""
    removed: float | None = None
    """Share of the chosen parts' weights that the plan removes, where the model's config is at hand."""
    problem: str = ""


def dry_run(recipe: Recipe, folder: Folder) -> tuple[list[PlannedCell], list[str]]:
    """Every cell, and remarks about what is not at hand. Nothing is written and no weights are fetched."""
    remarks = [f"no file {name}" for name in missing_files(recipe)]
    shapes: dict[str, ModelShape] = {}
    for model in recipe.models:
        source = recipe.located(model.source)
        try:
            if source in REGISTRY_MODELS and not (cache_folder() / "models" / source).is_dir():
                raise TrisectError("its weights were not downloaded yet.")
            shapes[model.name] = read_shape(source)[0]
        except TrisectError as error:
            remarks.append(f"{model.source} is not at hand, so its cells have no plan: {error}")
    return [_planned(cell, folder, shapes.get(cell.model.name)) for cell in cells_of(recipe)], remarks


def _planned(cell: Cell, folder: Folder, shape: ModelShape | None) -> PlannedCell:
    done, failed = folder.receipt_path(cell.key).exists(), folder.error_path(cell.key).exists()
    state, config = "done" if done else "failed before" if failed else "to run", cell.config
    # Plans that need measurements are not known beforehand, and methods on linear maps choose ranks.
    if config is None or shape is None or allocation(config) != "uniform" or get_method(config.method).linear:
        return PlannedCell(cell=cell, state=state)
    try:
        after = apply_plan(shape, plan_for(shape, config))
    except TrisectError as error:
        return PlannedCell(cell=cell, state=state, problem=str(error))
    gone = budget_of(shape).linear_parameters - budget_of(after).linear_parameters
    return PlannedCell(cell=cell, state=state, removed=gone / chosen_weights(shape, config))


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
    report = None if progress is None else partial(progress, f"tokens of {path.name}")
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
