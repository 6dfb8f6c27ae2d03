"""The Markdown page of a recipe, and the files beside it: one table per model, and the paper's diagnostic."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trisect.compare.outcomes import CellOutcome, Folder, ModelOutcome, Row, csv_text, outcomes_of
from trisect.compare.recipe import Drawing, Recipe
from trisect.support.files import atomic_write_bytes

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
        "table.csv": csv_text(models).encode(),
    }
    if figures:
        from trisect.compare.figures import draw

        drawn = draw(recipe, models)
        files |= {f"figures/{name}": svg for name, svg in drawn.items()}
        for old in (folder.path / "figures").glob("*.svg"):
            if old.name not in drawn:  # of a recipe that has changed since
                old.unlink()
    paths = {folder.path / name: data for name, data in files.items()}
    changed = [path for path in paths if not path.is_file() or path.read_bytes() != paths[path]]
    for path in changed:
        atomic_write_bytes(path, paths[path])
    return changed


def page(recipe: Recipe, models: Sequence[ModelOutcome]) -> str:
    """The whole page: a table for each model, then diagnostics and where the numbers come from."""
    blocks = [f"# {recipe.title}", recipe.note, LEGEND + (" Tasks: accuracy." if recipe.tasks else "")]
    for model in models:
        blocks += _section(recipe, model)
    for drawing in recipe.figures:
        if drawing.kind == "diagnostic":
            blocks += [_diagnostic_table(entry) for entry in diagnostics(models, drawing)]
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
        others = [values(rival) for rival in rivals if rival.receipt is not None]
        line = []
        for number, (text, value) in enumerate(values(outcome)):
            known = [rank for other in others if (rank := other[number][1]) is not None]
            line.append(f"**{text}**" if len(known) > 1 and value == min(known) else text)
        return line

    head = ["method", *(f"{_percent(ratio)}: {name}" for ratio in model.ratios for name in columns)]
    # The dense model has no ratio: its values stand in the columns of each.
    dense = ["dense", *cells(model.dense, []) * len(model.ratios)]
    lines = [_line(head), "|" + "---|" * len(head), _line(dense)]
    for row in model.rows:
        line = [model.label(row)]
        for ratio in model.ratios:
            # Only rows that cut the same parts compete.
            same = [other for other in model.rows if other.parts == row.parts and ratio in other.cells]
            line += cells(row.cells.get(ratio), [other.cells[ratio] for other in same])
        lines.append(_line(line))
    return "\n".join(lines)


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


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """What each component costs when it alone is cut, and all at once: one method, model and text.

    If local objectives add up, the sum of the single increases and the joint one agree.
    """

    model: str
    method: str
    text: str
    ratios: tuple[float, ...]
    alone: dict[str, dict[float, float]]
    """Component -> ratio -> increase in perplexity when only it is cut."""
    together: dict[float, float]
    lost: dict[str, dict[float, float]]
    """Component -> ratio -> share of its local objective that was lost, as the solver predicted it."""

    def sums(self) -> dict[float, float]:
        """Ratio -> the single increases added up, where all of them are known."""
        known = [r for r in self.ratios if all(r in increases for increases in self.alone.values())]
        return {ratio: sum(increases[ratio] for increases in self.alone.values()) for ratio in known}


def diagnostics(models: Sequence[ModelOutcome], drawing: Drawing) -> list[Diagnostic]:
    """One for every model and method that has a row for each component alone and one for all together."""
    found = []
    for model in models:
        rows: dict[str, dict[tuple[str, ...], Row]] = {}
        for row in model.rows:
            several = len(model.model.calibrations) > 1
            name = f"{row.method.name} ({row.calibration.name})" if several else row.method.name
            rows.setdefault(name, {}).setdefault(row.parts, row)
        number = model.text_number(drawing.evaluation)
        needed = {drawing.parts, *((part,) for part in drawing.parts)}
        for name, by_parts in rows.items():
            if number is not None and needed <= by_parts.keys():
                found.append(_diagnostic(model, name, number, by_parts, drawing.parts))
    return found


def _diagnostic(
    model: ModelOutcome, method: str, number: int, rows: Mapping[tuple[str, ...], Row], parts: tuple[str, ...]
) -> Diagnostic:
    def known(row: Row, value: Callable[[CellOutcome], float | None]) -> dict[float, float]:
        return {ratio: v for ratio, outcome in row.cells.items() if (v := value(outcome)) is not None}

    def increases(*cut: str) -> dict[float, float]:
        return known(rows[cut], lambda outcome: model.increase(outcome, number))

    def lost(part: str) -> dict[float, float]:
        return known(rows[part,], lambda outcome: outcome.objective_lost(part))

    return Diagnostic(
        model=model.model.name,
        method=method,
        text=model.model.evaluations[number].name,
        ratios=tuple(sorted(rows[parts].cells)),
        alone={part: increases(part) for part in parts},
        together=increases(*parts),
        lost={part: lost(part) for part in parts},
    )


def _diagnostic_table(entry: Diagnostic) -> str:
    """The table in the paper's form, with the local objectives below it."""

    def line(name: str, values: dict[float, float], text: Callable[[float], str] = _increase_text) -> str:
        return _line([name, *(text(values[r]) if r in values else "-" for r in entry.ratios)])

    names = [part.upper() for part in entry.alone]
    lines = [
        _line([f"{entry.model}, {entry.method}", *(f"{100 * ratio:g}%" for ratio in entry.ratios)]),
        "|---|" + "---|" * len(entry.ratios),
        *(line(part.upper(), increases) for part, increases in entry.alone.items()),
        line(" + ".join(names), entry.sums()),
        line("Both" if len(names) == 2 else "Together", entry.together),
        *(line(f"{p.upper()} objective lost", shares, "{:.2%}".format) for p, shares in entry.lost.items()),
    ]
    title = f"### Local objectives and perplexity: {entry.model}, {entry.method}"
    said = f"Increase in perplexity on {entry.text} when components are cut alone and together."
    return f"{title}\n\n{said}\n\n" + "\n".join(lines)


def _increase_text(value: float) -> str:
    return f"{value:.3f}" if value < 10 else number_text(value)


def number_text(value: float | None) -> str:
    """Two decimals while they mean something."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "inf"
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}" if value < 100_000 else f"{value:.2e}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
