"""The files of a recipe's results: one table per model, the paper's diagnostic, a CSV and figures."""

import csv
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path

from trisect.bench.rows import markdown
from trisect.compare.outcomes import COLUMNS, CellOutcome, Folder, ModelOutcome, Row, measurements, outcomes_of
from trisect.compare.recipe import Drawing, Recipe
from trisect.support.files import atomic_write_bytes
from trisect.support.plots import Bar, Chart, Figure, Groups, Point, Series, drawn

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
    if figures:
        pictures = draw(recipe, models)
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
            rows.setdefault(model.label(row, row.method.name), {}).setdefault(row.parts, row)
        texts = [text.name for text in model.model.evaluations]
        needed = {drawing.parts, *((part,) for part in drawing.parts)}
        for name, by_parts in rows.items():
            if (drawing.evaluation or texts[0]) in texts and needed <= by_parts.keys():
                number = texts.index(drawing.evaluation or texts[0])
                found.append(_diagnostic(model, name, number, by_parts, drawing.parts))
    return found


def _diagnostic(
    model: ModelOutcome, method: str, number: int, rows: Mapping[tuple[str, ...], Row], parts: tuple[str, ...]
) -> Diagnostic:
    def known(row: Row, value: Callable[[CellOutcome], float | None]) -> dict[float, float]:
        return {ratio: v for ratio, outcome in row.cells.items() if (v := value(outcome)) is not None}

    def increase(outcome: CellOutcome) -> float | None:
        return model.increase(outcome, number)

    return Diagnostic(
        model=model.model.name,
        method=method,
        text=model.model.evaluations[number].name,
        ratios=tuple(sorted(rows[parts].cells)),
        alone={part: known(rows[part,], increase) for part in parts},
        together=known(rows[parts], increase),
        lost={part: known(rows[part,], methodcaller("objective_lost", part)) for part in parts},
    )


def _diagnostic_table(entry: Diagnostic) -> str:
    """The table in the paper's form, with the local objectives below it."""

    def line(name: str, values: dict[float, float], text: Callable[[float], str] = _increase_text) -> list[str]:
        return [name, *(text(values[r]) if r in values else "-" for r in entry.ratios)]

    names = [part.upper() for part in entry.alone]
    lines = [
        *(line(part.upper(), increases) for part, increases in entry.alone.items()),
        line(" + ".join(names), entry.sums()),
        line("Both" if len(names) == 2 else "Together", entry.together),
        *(line(f"{p.upper()} objective lost", shares, "{:.2%}".format) for p, shares in entry.lost.items()),
    ]
    name = f"{entry.model}, {entry.method}"
    table = markdown([name, *(f"{100 * ratio:g}%" for ratio in entry.ratios)], lines).rstrip()
    said = f"Increase in perplexity on {entry.text} when components are cut alone and together."
    return f"### Local objectives and perplexity: {name}\n\n{said}\n\n{table}"


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


def draw(recipe: Recipe, models: Sequence[ModelOutcome]) -> dict[str, bytes]:
    """File name -> SVG, for every figure of the recipe that has something to show."""
    figures = [figure for drawing in recipe.figures for figure in _figures(drawing, models)]
    return drawn(figure for figure in figures if figure is not None)


def _figures(drawing: Drawing, models: Sequence[ModelOutcome]) -> Iterator[Figure | None]:
    if drawing.kind == "diagnostic":
        yield from map(_diagnostic_chart, diagnostics(models, drawing))
        return
    for model in models:
        for number, text in enumerate(model.model.evaluations):
            if drawing.evaluation in (None, text.name):
                yield _ratio(model, number) if drawing.kind == "ratio" else _bars(model, number, drawing.ratio)


def _ratio(model: ModelOutcome, number: int) -> Chart | None:
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


def _bars(model: ModelOutcome, number: int, asked: float | None) -> Groups | None:
    """Increase in perplexity at one ratio, bars grouped by the components that were cut."""
    ratio = min(model.ratios, default=0.0) if asked is None else asked
    groups: dict[str, list[Bar]] = {}
    for row in model.rows:
        increase = model.increase(row.cells[ratio], number) if ratio in row.cells else None
        if increase is not None and math.isfinite(increase):
            # The group names the parts.
            label = re.sub(rf" {','.join(row.parts)}\b", "", model.label(row))
            bar = Bar(label=label, value=increase, note=f"{increase:.2f}")
            groups.setdefault("+".join(row.parts).upper(), []).append(bar)
    name, text = model.model.name, model.model.evaluations[number].name
    title, label = f"{name}, {100 * ratio:g}% removed", f"increase in perplexity, {text}"
    return Groups(name=f"bars-{name}-{text}", title=title, y_label=label, groups=groups) if groups else None


def _diagnostic_chart(entry: Diagnostic) -> Chart | None:
    """Share of the local objective lost against the increase in perplexity, one line per component."""
    series = []
    for part, alone in entry.alone.items():
        ratios = [ratio for ratio in entry.ratios if ratio in alone and ratio in entry.lost[part]]
        points = [(100 * entry.lost[part][ratio], alone[ratio]) for ratio in ratios]
        notes = [f"{100 * ratio:g}%" for ratio in ratios]
        if points:
            series.append(Series(label=f"{part.upper()} alone", points=points, notes=notes))
    name, title = f"diagnostic-{entry.model}-{entry.method}-{entry.text}", f"{entry.model}, {entry.method}"
    axes = ("local objective lost (%)", f"increase in perplexity, {entry.text}")
    return Chart(name=name, title=title, axes=axes, series=series) if series else None
