"""Run a recipe: cell after cell, each at most once; what fails is written down and the rest goes on."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from trisect.calibrate import Progress
from trisect.compare.bench import Bench
from trisect.compare.cells import Cell, cells_of
from trisect.compare.folder import Folder
from trisect.compare.recipe import ModelEntry, Recipe
from trisect.compare.texts import make_texts
from trisect.errors import TrisectError, unknown_name
from trisect.support.receipt import package_commit, package_version

log = logging.getLogger(__name__)


@dataclass
class Tally:
    """What a run did."""

    done: int = 0
    """Cells that had a receipt already."""
    ran: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    elsewhere: int = 0
    """Cells that another process is running or has just run."""


def run_recipe(
    recipe: Recipe,
    folder: Folder,
    *,
    device: str = "cpu",
    only: Sequence[str] = (),
    keep_errors: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Tally:
    """Run every cell that has no receipt yet; with `keep_errors`, not those that failed before either."""
    check_only(recipe, only)
    tally = Tally()
    every = list({cell.key: cell for cell in cells_of(recipe)}.values())
    wanted = [cell for cell in every if _chosen(recipe, cell, only)]
    folder.prepare()
    missing = [cell for cell in wanted if not folder.receipt_path(cell.key).exists()]
    if keep_errors:
        missing = [cell for cell in missing if not folder.error_path(cell.key).exists()]
    tally.done = len(wanted) - len(missing)
    if missing:
        make_texts(recipe.texts, device=device, progress=progress)
    for model in recipe.models:
        mine = [cell for cell in missing if cell.model == model]
        if mine:
            same = [cell for cell in every if cell.model == model]
            bench = Bench(model, same, folder=folder, device=device, progress=progress, say=say)
            _run_model(model, mine, bench, folder=folder, tally=tally, total=len(missing), say=say)
    return tally


def check_only(recipe: Recipe, only: Sequence[str]) -> None:
    """Refuse a method or model that the recipe does not have."""
    known = _method_words(recipe) | {model.name for model in recipe.models}
    for word in only:
        if word not in known:
            raise unknown_name("method or model of this recipe", word, known)


def _chosen(recipe: Recipe, cell: Cell, only: Sequence[str]) -> bool:
    """The dense row belongs to every choice of methods: increases are against it."""
    models = {model.name for model in recipe.models}.intersection(only)
    methods = _method_words(recipe).intersection(only)
    if models and cell.model.name not in models:
        return False
    return not methods or cell.method is None or not methods.isdisjoint((cell.method.name, cell.method.label))


def _method_words(recipe: Recipe) -> set[str]:
    return {word for method in recipe.methods for word in (method.name, method.label)}


def _run_model(
    model: ModelEntry,
    cells: Sequence[Cell],
    bench: Bench,
    *,
    folder: Folder,
    tally: Tally,
    total: int,
    say: Callable[[str], None],
) -> None:
    try:
        say(f"loading {model.name}")
        bench.loaded  # noqa: B018, a model that cannot be loaded fails all its cells at once
    except Exception as error:
        for cell in cells:
            _fail(cell, error, folder=folder, tally=tally, say=say)
        return
    for cell in cells:
        with folder.claimed(cell.key) as mine:
            if not mine or folder.receipt_path(cell.key).exists():
                tally.elsewhere += 1
                continue
            say(f"cell {len(tally.ran) + len(tally.failed) + 1} of {total}: {cell.describe()}")
            try:
                folder.keep_receipt(cell.key, bench.run(cell))
                tally.ran.append(cell.key)
            except Exception as error:  # whatever it is, the other cells are worth having
                _fail(cell, error, folder=folder, tally=tally, say=say)
        bench.release()


def _fail(cell: Cell, error: Exception, *, folder: Folder, tally: Tally, say: Callable[[str], None]) -> None:
    message = explain(error)
    if not isinstance(error, TrisectError):
        log.warning("an error that is not the recipe's fault:", exc_info=error)
    say(f"failed: {cell.describe()}: {message}")
    entry = {
        "model": cell.model.source,
        "method": cell.label,
        "config": None if cell.config is None else cell.config.to_dict(),
        "error": message,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "trisect": package_version("trisect"),
        "commit": package_commit(),
    }
    folder.keep_error(cell.key, entry)
    tally.failed.append(cell.key)


def explain(error: Exception) -> str:
    """One line that names no machine: paths as they look from here."""
    kind = "" if isinstance(error, TrisectError) else f"{type(error).__name__}: "
    text = " ".join(f"{kind}{error}".split())
    here, assets = Path.cwd(), os.environ.get("TRISECT_ASSETS")
    places = [(assets.rstrip("/"), "../shared")] if assets else []
    places += [(str(here), "."), (str(here.parent), ".."), (str(Path.home()), "~")]
    for place, name in places:
        if place != "/":
            text = text.replace(place, name)
    return text[:500]
