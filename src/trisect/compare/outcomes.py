"""What came of a recipe's cells, in the order of a table: models, rows, ratios."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trisect.compare.cells import Cell, cells_of
from trisect.compare.folder import Folder
from trisect.compare.received import check_receipt
from trisect.compare.recipe import Calibration, MethodEntry, ModelEntry, Recipe
from trisect.records.parts import LINEARS

ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One cell with its receipt, its error, or neither where it was not run."""

    cell: Cell
    receipt: Mapping[str, Any] | None = None
    error: str | None = None

    def perplexity(self, text: int) -> float | None:
        """On the evaluation with this number; infinite where JSON could not hold it."""
        if self.receipt is None:
            return None
        value = self.receipt["perplexity"][text]["perplexity"]
        return math.inf if value is None else float(value)

    def accuracies(self) -> dict[str, float]:
        """Task -> its score, between 0 and 1."""
        scores = {} if self.receipt is None else self.receipt.get("tasks", {}).get("scores", {})
        return {name: float(score["value"]) for name, score in scores.items()}

    def removed(self, what: str = "chosen") -> float | None:
        """The share that is gone of what the ratio was asked of, or of something else."""
        return None if self.receipt is None or self.cell.config is None else self.receipt["removed"][what]

    @property
    def removed_of(self) -> str:
        """What the ratio is a share of: weights, or the KV cache."""
        return "" if self.receipt is None or self.cell.config is None else self.receipt["removed"]["of"]

    @property
    def missed(self) -> bool:
        """Whether it is more than one alignment step from the ratio it was asked for."""
        removed, step = self.removed(), self.removed("step")
        return removed is not None and abs(removed - self.cell.ratio) > (step or 0.0) + ROUNDING

    def objective_lost(self, part: str) -> float | None:
        """The share of a component's local objective that was given up, over all layers."""
        losses = {} if self.receipt is None else self.receipt.get("losses", {})
        entries = [losses[name] for name in (part, *LINEARS[part]) if name in losses]
        total = sum(entry["total"] for entry in entries)
        return sum(entry["loss"] for entry in entries) / total if total else None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method with one calibration set."""

    method: MethodEntry
    calibration: Calibration
    cells: Mapping[float, Outcome]

    @property
    def parts(self) -> tuple[str, ...]:
        config = next(iter(self.cells.values())).cell.config
        assert config is not None
        return config.parts


@dataclass(frozen=True, kw_only=True)
class ModelOutcome:
    """All rows of one model, the dense one first."""

    model: ModelEntry
    dense: Outcome
    rows: tuple[Row, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(sorted({ratio for row in self.rows for ratio in row.cells}))

    @property
    def outcomes(self) -> list[Outcome]:
        return [self.dense, *(outcome for row in self.rows for outcome in row.cells.values())]

    def label(self, row: Row) -> str:
        several = len(self.model.calibrations) > 1
        return f"{row.method.label} ({row.calibration.name})" if several else row.method.label

    def increase(self, outcome: Outcome, text: int) -> float | None:
        """Perplexity above the dense model's."""
        now, was = outcome.perplexity(text), self.dense.perplexity(text)
        return None if now is None or was is None else now - was

    def text_number(self, name: str | None) -> int | None:
        """The evaluation of that name, or the first; None if this model has none of that name."""
        names = [text.name for text in self.model.evaluations]
        return 0 if name is None else names.index(name) if name in names else None


def outcomes_of(recipe: Recipe, folder: Folder) -> list[ModelOutcome]:
    """Everything the folder knows about the recipe."""
    found = [_outcome(cell, folder) for cell in cells_of(recipe)]
    return [_model_outcome(model, [o for o in found if o.cell.model == model]) for model in recipe.models]


def _outcome(cell: Cell, folder: Folder) -> Outcome:
    receipt = folder.receipt(cell.key)
    if receipt is not None:
        path, texts = folder.receipt_path(cell.key), len(cell.model.evaluations)
        check_receipt(receipt, path, dense=cell.config is None, texts=texts)
    error = None if receipt is not None else folder.error(cell.key)
    return Outcome(cell=cell, receipt=receipt, error=None if error is None else str(error.get("error")))


def _model_outcome(model: ModelEntry, outcomes: list[Outcome]) -> ModelOutcome:
    rows: dict[tuple[str, str], dict[float, Outcome]] = {}
    for outcome in outcomes[1:]:
        cell = outcome.cell
        assert cell.method is not None
        assert cell.calibration is not None
        rows.setdefault((cell.calibration.name, cell.label), {})[cell.ratio] = outcome
    return ModelOutcome(
        model=model,
        dense=outcomes[0],
        rows=tuple(_row(cells) for cells in rows.values()),
    )


def _row(cells: dict[float, Outcome]) -> Row:
    first = next(iter(cells.values())).cell
    assert first.method is not None
    assert first.calibration is not None
    return Row(method=first.method, calibration=first.calibration, cells=cells)
