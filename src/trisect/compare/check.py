"""What a dry run says: the cells, which of them are done, and what each will remove where that is known."""

from dataclasses import dataclass
from pathlib import Path

from trisect.compare.cells import Cell, allocation, cells_of
from trisect.compare.count import chosen_weights
from trisect.compare.folder import Folder
from trisect.compare.recipe import ModelEntry, Recipe
from trisect.compare.sources import missing_sources
from trisect.compare.texts import located
from trisect.data import REGISTRY_MODELS
from trisect.data.hub import hub_answers
from trisect.data.registry import cache_folder
from trisect.errors import TrisectError
from trisect.methods import get_method
from trisect.models import read_shape
from trisect.plan import apply_plan, budget_of, plan_for
from trisect.records.shapes import ModelShape


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A cell, and what is known of it before it runs."""

    cell: Cell
    state: str
    """done, failed before, or to run."""
    removed: float | None = None
    """Share of the chosen parts' weights the plan takes, where the model's config is at hand."""
    problem: str = ""


def dry_run(recipe: Recipe, folder: Folder) -> tuple[list[Planned], list[str]]:
    """Every cell, and remarks about what is not at hand. Nothing is written, fetched or loaded."""
    remarks = [f"no file {name}" for name in missing_sources(recipe)]
    shapes: dict[str, ModelShape | None] = {}
    for model in recipe.models:
        try:
            shapes[model.name] = shape_at_hand(model)
            if shapes[model.name] is None:
                remarks.append(f"{model.source} is not at hand: its cells are listed without a plan")
        except TrisectError as error:
            shapes[model.name] = None
            remarks.append(str(error))
    cells = [planned(cell, folder, shapes[cell.model.name]) for cell in cells_of(recipe)]
    return cells, remarks


def planned(cell: Cell, folder: Folder, shape: ModelShape | None) -> Planned:
    """One cell as a dry run lists it."""
    state = "to run"
    if folder.receipt_path(cell.key).exists():
        state = "done"
    elif folder.error_path(cell.key).exists():
        state = "failed before"
    config = cell.config
    # Plans that need measurements cannot be told beforehand, and linear maps plan by ranks of their own.
    if config is None or shape is None or allocation(config) != "uniform" or get_method(config.method).linear:
        return Planned(cell=cell, state=state)
    try:
        after = apply_plan(shape, plan_for(shape, config))
    except TrisectError as error:
        return Planned(cell=cell, state=state, problem=str(error))
    gone = budget_of(shape).linear_parameters - budget_of(after).linear_parameters
    return Planned(cell=cell, state=state, removed=gone / chosen_weights(shape, config))


def shape_at_hand(model: ModelEntry) -> ModelShape | None:
    """Sizes from the model's config, if it can be had without a download of weights or a long wait."""
    source = located(model.source)
    if source in REGISTRY_MODELS:
        if not (cache_folder() / "models" / source).is_dir():
            return None
    elif not Path(source).exists() and not (_cached(source) or _hub_is_there()):
        return None
    shape, _, _ = read_shape(source)
    return shape


def _cached(source: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(source, "config.json"), str)
    except HFValidationError:
        return False


def _hub_is_there() -> bool:
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE and hub_answers()
