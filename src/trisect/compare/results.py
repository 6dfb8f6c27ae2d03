"""The results of a recipe: its folder, what the receipts say by model, row and ratio, and the files made of them."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import AliasPath, Field

from trisect.bench.rows import markdown
from trisect.compare.recipe import CalibrationEntry, Cell, MethodEntry, ModelEntry, Recipe, cells_of
from trisect.errors import TrisectError
from trisect.report.records import Entry, Perplexity, Score
from trisect.support.checks import read_record, validated
from trisect.support.files import after_others, atomic_write_bytes, check_writable, locked, write_json
from trisect.support.plots import Chart, Point, Series, file_name, has_matplotlib, svg

ROUNDING = 1e-9
RUN_AGAIN = "remove it, and its cell is run again"
COLUMNS = (
    *("model", "method", "parts", "calibration", "ratio", "removed", "removed_of", "missed", "zeros"),
    *("removed_decoder", "removed_kv", "removed_flops", "kv_bytes_per_token"),
    *("data", "metric", "value", "increase", "error"),
)
REMOVED = {
    **{"removed": "chosen", "removed_of": "of", "zeros": "zeros", "removed_decoder": "decoder"},
    **{"removed_kv": "kv_bytes_per_token", "removed_flops": "flops"},
}
"""Column -> its field in the receipt."""


class Removed(Entry):
    """Shares that were removed; `chosen` is the one to compare with the ratio."""

    of: str
    """What the ratio is a share of: weights, or KV."""
    chosen: float
    step: float | None
    zeros: float
    decoder: float
    kv_bytes_per_token: float
    flops: float


class CellReceipt(Entry):
    """What tables read of a cell's receipt. Anybody may have written the file, so it is validated."""

    fingerprint: str = Field(validation_alias=AliasPath("model", "fingerprint"))
    kv_bytes_per_token: int = Field(validation_alias=AliasPath("counts", "kv_bytes_per_token"))
    cpu: str = Field(validation_alias=AliasPath("receipt", "hardware", "cpu"))
    gpu: str | None = Field(validation_alias=AliasPath("receipt", "hardware", "gpu"))
    commit: str | None = Field(validation_alias=AliasPath("receipt", "commit"))
    perplexity: list[Perplexity]
    """In the order of the recipe's evaluations."""
    removed: Removed | None = None
    """None for the dense model."""
    notes: list[str] = []
    scores: dict[str, Score] = Field({}, validation_alias=AliasPath("tasks", "scores"))


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Where a recipe's receipts, errors and caches are."""

    path: Path

    @property
    def cache(self) -> Path:
        """Loss curves and locks: made again where they are missing."""
        return self.path / "cache"

    def receipt_path(self, key: str) -> Path:
        return self.path / "cells" / f"{key}.json"

    def error_path(self, key: str) -> Path:
        return self.path / "cells" / f"{key}.error.json"

    def receipt(self, key: str) -> dict[str, Any] | None:
        """All that the receipt of a cell says; None if it was not run."""
        return _read(self.receipt_path(key))

    def error(self, key: str) -> str | None:
        """Why a cell failed."""
        entry = _read(self.error_path(key))
        return None if entry is None else str(entry.get("error"))

    def keep_receipt(self, key: str, receipt: Mapping[str, Any]) -> None:
        write_json(self.receipt_path(key), receipt)
        self.error_path(key).unlink(missing_ok=True)

    def prepare(self) -> None:
        check_writable(self.path / "cells")
        self.cache.mkdir(parents=True, exist_ok=True)
        (self.cache / ".gitignore").write_text("*\n")  # so that nobody commits it

    @contextmanager
    def claimed(self, key: str) -> Iterator[bool]:
        """Whether a cell is this process's to run; several may work on one recipe."""
        with ExitStack() as stack:
            mine = True
            try:
                stack.enter_context(locked(self.cache / f"{key}.lock", "a cell of another process"))
            except TrisectError:
                mine = False
            yield mine

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Let one process make what many cells share, while the others wait for it."""
        return after_others(self.cache / f"{name}.lock")


def _read(path: Path) -> dict[str, Any] | None:
    return read_record(path, what="receipt", instead=RUN_AGAIN) if path.is_file() else None


@dataclass(frozen=True, kw_only=True)
class CellOutcome:
    """One cell with its receipt, its error, or neither where it was not run."""

    cell: Cell
    receipt: CellReceipt | None = None
    error: str | None = None

    def perplexity(self, text: int) -> float | None:
        """On the evaluation with this number."""
        if self.receipt is None:
            return None
        value = self.receipt.perplexity[text].perplexity
        return math.inf if value is None else value

    def accuracies(self) -> dict[str, float]:
        """Task -> its score, between 0 and 1."""
        scores = {} if self.receipt is None else self.receipt.scores
        return {name: score.value for name, score in scores.items()}

    def removed(self, what: str = "chosen") -> float | None:
        """The share that was removed of what the ratio was asked of, or of something else."""
        shares = None if self.receipt is None else self.receipt.removed
        return None if shares is None else getattr(shares, what)

    @property
    def missed(self) -> bool:
        """Whether it is more than one alignment step from the ratio it was asked for."""
        removed, step = self.removed(), self.removed("step")
        return removed is not None and abs(removed - self.cell.ratio) > (step or 0.0) + ROUNDING


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method with one calibration set."""

    method: MethodEntry
    calibration: CalibrationEntry
    cells: dict[float, CellOutcome]
    """By ratio."""

    @property
    def parts(self) -> tuple[str, ...]:
        config = next(iter(self.cells.values())).cell.config
        assert config is not None
        return config.parts


@dataclass(frozen=True, kw_only=True)
class ModelOutcome:
    """All rows of one model, and the dense model."""

    model: ModelEntry
    dense: CellOutcome
    rows: tuple[Row, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(sorted({ratio for row in self.rows for ratio in row.cells}))

    @property
    def outcomes(self) -> list[CellOutcome]:
        return [self.dense, *(outcome for row in self.rows for outcome in row.cells.values())]

    def label(self, row: Row) -> str:
        """The method's label, and its calibration set where there are several."""
        return row.method.label + (f" ({row.calibration.name})" if len(self.model.calibrations) > 1 else "")

    def increase(self, outcome: CellOutcome, text: int) -> float | None:
        """Perplexity above the dense model's."""
        now, was = outcome.perplexity(text), self.dense.perplexity(text)
        return None if now is None or was is None else now - was


def outcomes_of(recipe: Recipe, folder: Folder) -> list[ModelOutcome]:
    """Everything the folder knows about the recipe, model by model."""
    dense: dict[str, CellOutcome] = {}
    rows: dict[str, dict[tuple[str, str], Row]] = {model.name: {} for model in recipe.models}
    for cell in cells_of(recipe):
        outcome, method, calibration = _outcome(cell, folder), cell.method, cell.calibration
        if method is None or calibration is None:
            dense[cell.model.name] = outcome
        else:
            row = Row(method=method, calibration=calibration, cells={})
            row = rows[cell.model.name].setdefault((calibration.name, method.label), row)
            row.cells[cell.ratio] = outcome
    return [
        ModelOutcome(model=model, dense=dense[model.name], rows=tuple(rows[model.name].values()))
        for model in recipe.models
    ]


def _outcome(cell: Cell, folder: Folder) -> CellOutcome:
    data = folder.receipt(cell.key)
    if data is None:
        return CellOutcome(cell=cell, error=folder.error(cell.key))
    try:
        receipt = validated(CellReceipt, data)
        if len(receipt.perplexity) != len(cell.model.evaluations):
            raise TrisectError(f"perplexity must be a list for {len(cell.model.evaluations)} texts.")
        if cell.config is not None and receipt.removed is None:
            raise TrisectError("removed is missing.")
    except TrisectError as error:
        path = folder.receipt_path(cell.key)
        raise TrisectError(f"{path} is no receipt: {error} To mend it, {RUN_AGAIN}.") from error
    return CellOutcome(cell=cell, receipt=receipt)


def measurements(models: Sequence[ModelOutcome]) -> Iterator[dict[str, Any]]:
    """Every number of the table with what belongs to it, keyed by COLUMNS."""
    for model in models:
        for outcome in model.outcomes:
            fixed = _fixed_columns(outcome)
            if outcome.receipt is None:
                yield {**fixed, "error": outcome.error or "not run"}
                continue
            for number, text in enumerate(model.model.evaluations):
                value, increase = outcome.perplexity(number), model.increase(outcome, number)
                found = {"data": text.name, "metric": "perplexity", "value": value, "increase": increase}
                yield fixed | found
            dense = model.dense.accuracies()
            for task, value in outcome.accuracies().items():
                increase = value - dense[task] if task in dense else None
                yield fixed | {"data": task, "metric": "accuracy", "value": value, "increase": increase}


def _fixed_columns(outcome: CellOutcome) -> dict[str, Any]:
    """What all measurements of one cell have in common."""
    cell, receipt = outcome.cell, outcome.receipt
    data = dict.fromkeys(COLUMNS, "") | {"model": cell.model.name, "method": cell.label, "ratio": cell.ratio}
    if cell.config is not None and cell.calibration is not None:
        data |= {"parts": ",".join(cell.config.parts), "calibration": cell.calibration.name}
    if receipt is not None:
        data["kv_bytes_per_token"] = receipt.kv_bytes_per_token
    if receipt is not None and receipt.removed is not None:
        data |= {column: getattr(receipt.removed, name) for column, name in REMOVED.items()}
        data["missed"] = "yes" if outcome.missed else "no"
    return data


SAME_SIZE = 0.01
"""Shares removed that differ by no more are compared."""
MISS = "(!)"
MISS_LEGEND = f"{MISS} misses the asked ratio by more than one alignment step."
LEGEND = (
    "Perplexity, in brackets its increase over the dense model; *removed* is counted from the modules, "
    "as a share of what the ratio was asked of: the weights of the parts cut, unless it says KV."
)


def write_results(recipe: Recipe, folder: Folder, source: Path, *, figures: bool = True) -> list[Path]:
    """Make table, CSV, figures and a copy of the recipe from the receipts; the files that changed."""
    models = outcomes_of(recipe, folder)
    files = {
        "recipe.yaml": source.read_bytes(),
        "table.md": page(recipe, models).encode(),
        "table.csv": to_csv(models).encode(),
    }
    if figures and has_matplotlib():
        pictures = draw(models)
        files |= {f"figures/{name}": svg for name, svg in pictures.items()}
        for old in (folder.path / "figures").glob("*.svg"):
            if old.name not in pictures:  # of a recipe that has changed since
                old.unlink()
    paths = {folder.path / name: data for name, data in files.items()}
    changed = [path for path in paths if not path.is_file() or path.read_bytes() != paths[path]]
    for path in changed:
        atomic_write_bytes(path, paths[path])
    return changed


def to_csv(models: Sequence[ModelOutcome]) -> str:
    """One line per number."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(measurements(models))
    return out.getvalue()


def page(recipe: Recipe, models: Sequence[ModelOutcome]) -> str:
    """The whole page: a table for each model, and where the numbers come from."""
    blocks = [f"# {recipe.title}", recipe.note, LEGEND + (" Tasks: accuracy." if recipe.tasks else "")]
    for model in models:
        blocks += _section(recipe, model)
    return "\n\n".join(filter(None, [*blocks, _provenance(models)])) + "\n"


def _section(recipe: Recipe, model: ModelOutcome) -> list[str]:
    failures = [outcome for outcome in model.outcomes if outcome.error is not None]
    remarks = [*_solver_notes(model), *_disagreements(model)]
    return [
        f"## {model.model.name}",
        f"Model: {model.model.note}." if model.model.note else "",
        _table(recipe, model, failures),
        MISS_LEGEND if any(outcome.missed for outcome in model.outcomes) else "",
        "\n".join(f"[{at}] {o.cell.describe()}: {o.error}" for at, o in enumerate(failures, start=1)),
        "\n".join(f"- {remark}" for remark in remarks),
    ]


def _table(recipe: Recipe, model: ModelOutcome, failures: Sequence[CellOutcome]) -> str:
    """The dense model first, then a line for each row; columns repeat for each ratio."""
    tasks = dict.fromkeys(name for outcome in model.outcomes for name in _accuracies(outcome))
    texts = [text.name for text in model.model.evaluations]
    columns = ["removed", *(["KV bytes per token"] if recipe.kv else []), *texts, *tasks]

    def values(outcome: CellOutcome) -> list[tuple[str, float | None]]:
        """The text of each column, and what is compared: less is better."""
        found: list[tuple[str, float | None]] = [(_removed(outcome), None)]
        if outcome.receipt is not None and recipe.kv:
            found.append((f"{outcome.receipt.kv_bytes_per_token:,}", None))
        found += [(_perplexity(model, n, outcome), outcome.perplexity(n)) for n in range(len(texts))]
        scores = _accuracies(outcome)
        return found + [(f"{scores[t]:.4f}", -scores[t]) if t in scores else ("-", None) for t in tasks]

    def cells(outcome: CellOutcome | None, rivals: Sequence[CellOutcome]) -> list[str]:
        if outcome is None:
            return [""] * len(columns)
        if outcome.receipt is None:
            said = "not run" if outcome.error is None else f"failed [{failures.index(outcome) + 1}]"
            return [said, *["-"] * (len(columns) - 1)]
        own = outcome.removed() or 0.0
        there = [rival for rival in rivals if rival.receipt is not None]
        # The best of its size: a larger model is no rival.
        others = [values(rival) for rival in there if abs((rival.removed() or 0.0) - own) <= SAME_SIZE]
        line = []
        for number, (text, value) in enumerate(values(outcome)):
            known = [rank for other in others if (rank := other[number][1]) is not None]
            line.append(f"**{text}**" if len(known) > 1 and value == min(known) else text)
        return line

    head = ["method", *(f"{_percent(ratio)}: {name}" for ratio in model.ratios for name in columns)]
    # The dense model has no ratio: its values stand in the columns of each.
    dense = ["dense", *cells(model.dense, []) * len(model.ratios)]
    lines = [dense]
    for row in model.rows:
        line = [model.label(row)]
        for ratio in model.ratios:
            # Only rows that cut the same parts compete.
            same = [other for other in model.rows if other.parts == row.parts and ratio in other.cells]
            line += cells(row.cells.get(ratio), [other.cells[ratio] for other in same])
        lines.append(line)
    return markdown(head, lines).rstrip()


def _removed(outcome: CellOutcome) -> str:
    shares = None if outcome.receipt is None else outcome.receipt.removed
    if shares is None:
        return "-"
    what = " of KV" if shares.of == "KV" else " as zeros" if shares.zeros else ""
    return f"{_percent(shares.chosen)}{what}{f' {MISS}' if outcome.missed else ''}"


def _perplexity(model: ModelOutcome, number: int, outcome: CellOutcome) -> str:
    text, increase = number_text(outcome.perplexity(number)), model.increase(outcome, number)
    if outcome is model.dense or increase is None:
        return text
    return f"{text} ({increase:+.2f})" if abs(increase) < 1000 else f"{text} ({increase:+.2g})"


def _accuracies(outcome: CellOutcome) -> dict[str, float]:
    """Scores by task; with several tasks, also their mean."""
    scores = outcome.accuracies()
    return scores | ({"mean accuracy": sum(scores.values()) / len(scores)} if len(scores) > 1 else {})


def _solver_notes(model: ModelOutcome) -> list[str]:
    """What solvers noted, each remark with the rows it is about."""
    about: dict[str, list[str]] = {}
    for row in model.rows:
        for ratio, outcome in row.cells.items():
            for note in () if outcome.receipt is None else outcome.receipt.notes:
                about.setdefault(note, []).append(f"{model.label(row)} at {_percent(ratio)}")
    return [f"{', '.join(rows)}: {note}" for note, rows in about.items()]


def _disagreements(model: ModelOutcome) -> list[str]:
    """Receipts of one table must be about one model and one text."""
    receipts = [outcome.receipt for outcome in model.outcomes if outcome.receipt is not None]
    found = []
    if len({receipt.fingerprint for receipt in receipts}) > 1:
        found.append("the receipts are not all of the same weights: the model changed between two runs")
    for number, text in enumerate(model.model.evaluations):
        if len({receipt.perplexity[number].token_hash for receipt in receipts}) > 1:
            found.append(f"{text.name}: the receipts were not all measured on the same tokens")
    return found


def _provenance(models: Sequence[ModelOutcome]) -> str:
    outcomes = [outcome for model in models for outcome in model.outcomes]
    receipts = [outcome.receipt for outcome in outcomes if outcome.receipt is not None]
    said = f"Made by `trisect compare` from {len(receipts)} of {len(outcomes)} receipts in `cells/`"
    if not receipts:
        return f"{said}."
    commits = {(str(r.commit)[:12], "-dirty" if str(r.commit).endswith("-dirty") else "") for r in receipts}
    machines = sorted({receipt.gpu or receipt.cpu for receipt in receipts})
    return f"{said}; measured on {', '.join(machines)}; commit {', '.join(sorted(map(''.join, commits)))}."


def number_text(value: float | None) -> str:
    """Two decimals while they mean something."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "inf"
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}" if value < 100_000 else f"{value:.2e}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def draw(models: Sequence[ModelOutcome]) -> dict[str, bytes]:
    """File name -> SVG, for every model and text that has something to show."""
    charts = [ratio_chart(model, number) for model in models for number in range(len(model.model.evaluations))]
    return {file_name(chart.name): f"{svg(chart)}\n".encode() for chart in charts if chart is not None}


def ratio_chart(model: ModelOutcome, number: int) -> Chart | None:
    """Perplexity against the ratio really removed, one line per method."""
    lines = {model.label(row): _points(row, number) for row in model.rows}
    series = [Series(label=label, points=points) for label, points in lines.items() if points]
    if not series:
        return None
    dense, removed = model.dense.perplexity(number), [x for each in series for x, _ in each.points]
    if dense is not None and math.isfinite(dense):
        ends = [(min(removed), dense), (max(removed), dense)]
        series.append(Series(label="dense", guide=True, points=ends))
    name, text = model.model.name, model.model.evaluations[number].name
    axes = ("removed (%)", f"perplexity, {text}")
    return Chart(name=f"ratio-{name}-{text}", title=name, axes=axes, series=series, log_y=True)


def _points(row: Row, number: int) -> list[Point]:
    known = ((outcome.removed(), outcome.perplexity(number)) for outcome in row.cells.values())
    return sorted((100 * x, y) for x, y in known if x is not None and y is not None and math.isfinite(y))
