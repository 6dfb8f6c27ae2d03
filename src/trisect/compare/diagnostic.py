"""The paper's diagnostic: what each component costs when it alone is cut, their sum, and all of them at once.

If local objectives add up, the row of sums and the row of joint cuts agree. The objectives themselves stand
below: the share of each that was given up, as the solver predicted it, over all layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trisect.compare.outcomes import ModelOutcome, Outcome, Row
from trisect.compare.recipe import Drawing
from trisect.compare.table import number_text


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """One method on one model, on one text."""

    model: str
    method: str
    text: str
    ratios: tuple[float, ...]
    alone: dict[str, dict[float, float]]
    """Component -> ratio -> increase in perplexity when only it is cut."""
    together: dict[float, float]
    lost: dict[str, dict[float, float]]
    """Component -> ratio -> share of its local objective that was lost."""

    def sums(self) -> dict[float, float]:
        """Ratio -> the single increases added up, where all of them are known."""
        return {
            ratio: sum(increases[ratio] for increases in self.alone.values())
            for ratio in self.ratios
            if all(ratio in increases for increases in self.alone.values())
        }


def diagnostics(models: Sequence[ModelOutcome], drawing: Drawing) -> list[Diagnostic]:
    """One for every model and method that has a row for each component alone and one for all together."""
    found = []
    for model in models:
        number = model.text_number(drawing.evaluation)
        if number is None:
            continue
        for name, rows in _by_method(model).items():
            single = {part: rows.get((part,)) for part in drawing.parts}
            both = rows.get(drawing.parts)
            if both is not None and all(row is not None for row in single.values()):
                known = {part: row for part, row in single.items() if row is not None}
                found.append(_diagnostic(model, name, number, known, both))
    return found


def _by_method(model: ModelOutcome) -> dict[str, dict[tuple[str, ...], Row]]:
    """Method and calibration -> parts -> its first row."""
    rows: dict[str, dict[tuple[str, ...], Row]] = {}
    several = len(model.model.calibrations) > 1
    for row in model.rows:
        name = f"{row.method.name} ({row.calibration.name})" if several else row.method.name
        rows.setdefault(name, {}).setdefault(row.parts, row)
    return rows


def _diagnostic(
    model: ModelOutcome, method: str, number: int, single: dict[str, Row], both: Row
) -> Diagnostic:
    def increases(row: Row) -> dict[float, float]:
        found = {ratio: model.increase(outcome, number) for ratio, outcome in row.cells.items()}
        return {ratio: value for ratio, value in found.items() if value is not None}

    return Diagnostic(
        model=model.model.name,
        method=method,
        text=model.model.evaluations[number].name,
        ratios=tuple(sorted(both.cells)),
        alone={part: increases(row) for part, row in single.items()},
        together=increases(both),
        lost={part: _lost(row.cells, part) for part, row in single.items()},
    )


def _lost(cells: Mapping[float, Outcome], part: str) -> dict[float, float]:
    found = {ratio: outcome.objective_lost(part) for ratio, outcome in cells.items()}
    return {ratio: value for ratio, value in found.items() if value is not None}


def markdown(entry: Diagnostic) -> str:
    """The table in the paper's form, with the local objectives below it."""
    names = [part.upper() for part in entry.alone]
    head = f"| {entry.model}, {entry.method} | " + " | ".join(f"{100 * r:g}%" for r in entry.ratios) + " |"
    lines = [head, "|---|" + "---|" * len(entry.ratios)]
    lines += [_line(part.upper(), values, entry.ratios) for part, values in entry.alone.items()]
    lines.append(_line(" + ".join(names), entry.sums(), entry.ratios))
    lines.append(_line("Both" if len(names) == 2 else "Together", entry.together, entry.ratios))
    for part, shares in entry.lost.items():
        lines.append(_line(f"{part.upper()} objective lost", shares, entry.ratios, percent=True))
    title = f"### Local objectives and perplexity: {entry.model}, {entry.method}"
    said = f"Increase in perplexity on {entry.text} when components are cut alone and together."
    return f"{title}\n\n{said}\n\n" + "\n".join(lines)


def _line(name: str, values: dict[float, float], ratios: Sequence[float], *, percent: bool = False) -> str:
    def shown(value: float | None) -> str:
        if value is None:
            return "-"
        return f"{100 * value:.2f}%" if percent else f"{value:.3f}" if value < 10 else number_text(value)

    return f"| {name} | " + " | ".join(shown(values.get(ratio)) for ratio in ratios) + " |"
