"""The results of a recipe: its folder, what the receipts say of each cell, and the files made of them."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import AliasPath, Field

from trisect.bench.rows import markdown
from trisect.compare.recipe import Cell, Recipe, cells_of
from trisect.errors import TrisectError
from trisect.report.runs import Score
from trisect.support import checks, files, plots
from trisect.support.receipt import Entry, Perplexity

ROUNDING = 1e-9
SAME_SIZE = 0.01  # shares removed that differ by no more are compared
RUN_AGAIN = "remove it, and its cell is run again"
MISS = "(!)"
LEGEND = (
    "Perplexity, in brackets its increase over the dense model, the best of one size in bold; *removed* is counted "
    "from the modules, as a share of what the ratio was asked of: the weights of the parts cut, unless it says KV."
)


class Removed(Entry):
    """Shares that were removed; `chosen` is the one to compare with the ratio."""

    of: str  # what the ratio is a share of: weights, or KV
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
    perplexity: list[Perplexity]  # in the order of the recipe's evaluations
    removed: Removed | None = None  # None for the dense model
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

    def receipt(self, key: str, *, errors: bool = False) -> dict[str, Any] | None:
        """All that the receipt of a cell says, with `errors` also one that is an `error`; None if it has none."""
        if not (path := self.receipt_path(key)).is_file():
            return None
        found = checks.read_record(path, what="receipt", instead=RUN_AGAIN)
        return found if errors or "error" not in found else None

    def prepare(self) -> None:
        files.check_writable(self.path / "cells")
        self.cache.mkdir(parents=True, exist_ok=True)
        (self.cache / ".gitignore").write_text("*\n")  # so that nobody commits it

    @contextmanager
    def claimed(self, key: str) -> Iterator[bool]:
        """Whether a cell is this process's to run; several may work on one recipe."""
        with ExitStack() as stack:
            try:
                stack.enter_context(files.locked(self.cache / f"{key}.lock", "a cell of another process"))
            except TrisectError:
                yield False
                return
            yield True


@dataclass(frozen=True, kw_only=True)
class CellOutcome:
    """One cell with its receipt, its error, or neither where it was not run."""

    cell: Cell
    receipt: CellReceipt | None = None
    error: str | None = None
    dense: CellReceipt | None = None  # of the model that it was made from

    def perplexity(self, text: int) -> float | None:
        """On the evaluation with this number."""
        return None if self.receipt is None else self.receipt.perplexity[text].value

    def increase(self, text: int) -> float | None:
        """Perplexity above the dense model's."""
        now = self.perplexity(text)
        return None if now is None or self.dense is None else now - self.dense.perplexity[text].value

    def accuracies(self) -> dict[str, float]:
        """Task -> its score, between 0 and 1; with several tasks, also their mean."""
        scores = {} if self.receipt is None else self.receipt.scores
        found = {name: score.value for name, score in scores.items()}
        return found | ({"mean accuracy": sum(found.values()) / len(found)} if len(found) > 1 else {})

    def removed(self, what: str = "chosen") -> float | None:
        """The share that was removed of what the ratio was asked of, or of something else."""
        shares = None if self.receipt is None else self.receipt.removed
        return None if shares is None else getattr(shares, what)

    @property
    def missed(self) -> bool:
        """Whether it is more than one alignment step from the ratio it was asked for."""
        removed, step = self.removed(), self.removed("step")
        return removed is not None and abs(removed - self.cell.ratio) > (step or 0.0) + ROUNDING

    def competes_with(self, other: "CellOutcome") -> bool:
        """Whether both cut the same parts and came to the same size: a larger model is no rival."""
        one, two = self.cell.config, other.cell.config
        same = one is not None and two is not None and one.parts == two.parts and one.ratio == two.ratio
        return same and abs((self.removed() or 0.0) - (other.removed() or 0.0)) <= SAME_SIZE


Models = Sequence[Sequence[CellOutcome]]  # all cells of each model, the dense one first


def outcomes_of(recipe: Recipe, folder: Folder) -> Models:
    """Everything the folder knows about the recipe, model by model."""
    found: dict[str, list[CellOutcome]] = {}
    for cell in cells_of(recipe):
        known, outcome = found.setdefault(cell.model.name, []), _outcome(cell, folder)
        known.append(replace(outcome, dense=known[0].receipt if known else outcome.receipt))
    return list(found.values())


def _outcome(cell: Cell, folder: Folder) -> CellOutcome:
    data = folder.receipt(cell.key, errors=True)
    if data is None or "error" in data:
        return CellOutcome(cell=cell, error=None if data is None else str(data["error"]))
    try:
        receipt = checks.validated(CellReceipt, data)
        if len(receipt.perplexity) != len(cell.model.evaluations):
            raise TrisectError(f"perplexity must be a list for {len(cell.model.evaluations)} texts.")
        if cell.config is not None and receipt.removed is None:
            raise TrisectError("removed is missing.")
    except TrisectError as error:
        path = folder.receipt_path(cell.key)
        raise TrisectError(f"{path} is no receipt: {error} To mend it, {RUN_AGAIN}.") from error
    return CellOutcome(cell=cell, receipt=receipt)


def measurements(models: Models) -> Iterator[dict[str, Any]]:
    """Every number of the table with what belongs to it."""
    for outcome in chain(*models):
        cell, receipt = outcome.cell, outcome.receipt
        fixed: dict[str, Any] = {"model": cell.model.name, "method": cell.label, "ratio": cell.ratio}
        if cell.config is not None and cell.calibration is not None:
            fixed |= {"parts": cell.config.parts, "calibration": cell.calibration.name}
        if receipt is None:
            yield {**fixed, "error": outcome.error or "not run"}
            continue
        fixed["kv_bytes_per_token"] = receipt.kv_bytes_per_token
        if receipt.removed is not None:
            fixed |= {"removed": receipt.removed.model_dump(), "missed": outcome.missed}
        for number, text in enumerate(cell.model.evaluations):
            value, increase = outcome.perplexity(number), outcome.increase(number)
            yield fixed | {"data": text.name, "metric": "perplexity", "value": value, "increase": increase}
        for task, score in receipt.scores.items():
            was = None if outcome.dense is None else outcome.dense.scores.get(task)
            increase = None if was is None else score.value - was.value
            yield fixed | {"data": task, "metric": "accuracy", "value": score.value, "increase": increase}


def write_results(recipe: Recipe, models: Models, folder: Folder, source: Path) -> list[Path]:
    """Make table, figures and a copy of the recipe from the receipts; the files that changed."""
    made = {"recipe.yaml": source.read_bytes(), "table.md": page(recipe, models).encode()}
    if plots.has_matplotlib():
        pictures = draw(models)
        made |= {f"figures/{name}": svg for name, svg in pictures.items()}
        for old in (folder.path / "figures").glob("*.svg"):
            if old.name not in pictures:  # of a recipe that has changed since
                old.unlink()
    paths = {folder.path / name: data for name, data in made.items()}
    changed = [path for path in paths if not path.is_file() or path.read_bytes() != paths[path]]
    for path in changed:
        files.atomic_write_bytes(path, paths[path])
    return changed


def page(recipe: Recipe, models: Models) -> str:
    """The whole page: a table for each model, and where the numbers come from."""
    blocks = [f"# {recipe.title}", recipe.note, LEGEND + (" Tasks: accuracy." if recipe.tasks else "")]
    for outcomes in models:
        model, failures = outcomes[0].cell.model, [outcome for outcome in outcomes if outcome.error is not None]
        missed = any(outcome.missed for outcome in outcomes)
        blocks += [
            f"## {model.name}",
            f"Model: {model.note}." if model.note else "",
            _table(recipe, outcomes, failures),
            f"{MISS} misses the asked ratio by more than one alignment step." if missed else "",
            "\n".join(f"[{at}] {o.cell.describe()}: {o.error}" for at, o in enumerate(failures, start=1)),
            "\n".join(f"- {remark}" for remark in _remarks(outcomes)),
        ]
    return "\n\n".join(filter(None, [*blocks, _provenance(models)])) + "\n"


def _table(recipe: Recipe, outcomes: Sequence[CellOutcome], failures: Sequence[CellOutcome]) -> str:
    """A line for each cell, the dense model first, then ratio by ratio."""
    texts = [text.name for text in outcomes[0].cell.model.evaluations]
    tasks = list(dict.fromkeys(task for outcome in outcomes for task in outcome.accuracies()))
    lines = []
    for outcome in sorted(outcomes, key=lambda outcome: outcome.cell.ratio):
        cell, receipt = outcome.cell, outcome.receipt
        line = [cell.row, _percent(cell.ratio) if cell.config else "", _removed(outcome, failures)]
        if recipe.kv:
            line.append("-" if receipt is None else f"{receipt.kv_bytes_per_token:,}")
        rivals = [other for other in outcomes if outcome.competes_with(other)]
        for number in range(len(texts)):
            own = outcome.perplexity(number)
            increase = None if cell.config is None else outcome.increase(number)
            known = [value for rival in rivals if (value := rival.perplexity(number)) is not None]
            line.append(_bold(_perplexity(own, increase), len(known) > 1 and own == min(known)))
        for task in tasks:
            score = outcome.accuracies().get(task)
            scores = [rival.accuracies()[task] for rival in rivals if task in rival.accuracies()]
            line.append(_bold("-" if score is None else f"{score:.4f}", len(scores) > 1 and score == max(scores)))
        lines.append(line)
    head = ["method", "ratio", "removed", *(["KV bytes per token"] if recipe.kv else []), *texts, *tasks]
    return markdown(head, lines).rstrip()


def _bold(text: str, best: bool) -> str:
    return f"**{text}**" if best else text


def _removed(outcome: CellOutcome, failures: Sequence[CellOutcome]) -> str:
    if outcome.receipt is None:
        return "not run" if outcome.error is None else f"failed [{failures.index(outcome) + 1}]"
    shares = outcome.receipt.removed
    if shares is None:
        return "-"
    what = " of KV" if shares.of == "KV" else " as zeros" if shares.zeros else ""
    return f"{_percent(shares.chosen)}{what}{f' {MISS}' if outcome.missed else ''}"


def _perplexity(value: float | None, increase: float | None) -> str:
    """Two decimals while they mean something."""
    if value is None or math.isinf(value):
        return "-" if value is None else "inf"
    text = f"{value:.2f}" if value < 1000 else f"{value:.0f}" if value < 100_000 else f"{value:.2e}"
    if increase is None:
        return text
    return f"{text} ({increase:+.2f})" if abs(increase) < 1000 else f"{text} ({increase:+.2g})"


def _remarks(outcomes: Sequence[CellOutcome]) -> list[str]:
    """What solvers noted, with the cells it is about; and receipts that are not about one model and one text."""
    about: dict[str, list[str]] = {}
    known = [(outcome.cell, outcome.receipt) for outcome in outcomes if outcome.receipt is not None]
    for cell, receipt in known:
        for note in receipt.notes:
            about.setdefault(note, []).append(cell.describe().removeprefix(f"{cell.model.name}, "))
    found = [f"{', '.join(cells)}: {note}" for note, cells in about.items()]
    if len({receipt.fingerprint for _, receipt in known}) > 1:
        found.append("the receipts are not all of the same weights: the model changed between two runs")
    for number, text in enumerate(outcomes[0].cell.model.evaluations):
        if len({receipt.perplexity[number].token_hash for _, receipt in known}) > 1:
            found.append(f"{text.name}: the receipts were not all measured on the same tokens")
    return found


def _provenance(models: Models) -> str:
    outcomes = list(chain(*models))
    receipts = [outcome.receipt for outcome in outcomes if outcome.receipt is not None]
    said = f"Made by `trisect compare` from {len(receipts)} of {len(outcomes)} receipts in `cells/`"
    if not receipts:
        return f"{said}."
    commits = {(str(r.commit)[:12], "-dirty" if str(r.commit).endswith("-dirty") else "") for r in receipts}
    machines = sorted({receipt.gpu or receipt.cpu for receipt in receipts})
    return f"{said}; measured on {', '.join(machines)}; commit {', '.join(sorted(map(''.join, commits)))}."


def _percent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def draw(models: Models) -> dict[str, bytes]:
    """File name -> SVG, for every model and text that has something to show."""
    texts = [(outcomes, n) for outcomes in models for n in range(len(outcomes[0].cell.model.evaluations))]
    charts = [ratio_chart(*each) for each in texts]
    drawn = (chart for chart in charts if chart is not None)
    return {plots.file_name(chart.name): f"{plots.svg(chart)}\n".encode() for chart in drawn}


def ratio_chart(outcomes: Sequence[CellOutcome], number: int) -> plots.Chart | None:
    """Perplexity against the ratio really removed, one line per method."""
    lines: dict[str, list[plots.Point]] = {}
    for outcome in outcomes:
        x, y = outcome.removed(), outcome.perplexity(number)
        if x is not None and y is not None and math.isfinite(y):
            lines.setdefault(outcome.cell.row, []).append((100 * x, y))
    if not lines:
        return None
    series = [plots.Series(label=label, points=sorted(points)) for label, points in lines.items()]
    dense, removed = outcomes[0].perplexity(number), [x for points in lines.values() for x, _ in points]
    if dense is not None and math.isfinite(dense):
        series.append(plots.Series(label="dense", guide=True, points=[(at(removed), dense) for at in (min, max)]))
    name, text = outcomes[0].cell.model.name, outcomes[0].cell.model.evaluations[number].name
    axes = ("removed (%)", f"perplexity, {text}")
    return plots.Chart(name=f"ratio-{name}-{text}", title=name, axes=axes, series=series, log_y=True)
