"""The Markdown table: one per model, methods down, ratios and texts across, the dense model first."""

import math
from collections.abc import Sequence

from trisect.compare.outcomes import ModelOutcome, Outcome, Row
from trisect.compare.recipe import Recipe

MISS = "(!)"
MISS_LEGEND = f"{MISS} misses the asked ratio by more than one alignment step."


def markdown(recipe: Recipe, models: Sequence[ModelOutcome], *, extra: Sequence[str] = ()) -> str:
    """The whole page; `extra` are sections that stand behind the tables."""
    blocks = [f"# {recipe.title}"]
    if recipe.note:
        blocks.append(recipe.note)
    blocks.append(
        "Perplexity, in brackets its increase over the dense model; *removed* is counted from the modules, "
        "as a share of what the ratio was asked of: the weights of the parts cut, unless it says KV."
    )
    if recipe.tasks is not None:
        blocks[-1] += " Tasks: accuracy."
    for model in models:
        blocks += _section(recipe, model)
    return "\n\n".join([*blocks, *extra, provenance(models)]) + "\n"


def _section(recipe: Recipe, model: ModelOutcome) -> list[str]:
    blocks = [f"## {model.model.name}"]
    if model.model.note:
        blocks.append(f"Model: {model.model.note}.")
    failures: list[str] = []
    blocks.append(_table(recipe, model, failures))
    if any(outcome.missed for outcome in model.outcomes):
        blocks.append(MISS_LEGEND)
    if failures:
        blocks.append("\n".join(f"[{number}] {line}" for number, line in enumerate(failures, start=1)))
    remarks = [*_remarks(model), *_disagreements(model)]
    if remarks:
        blocks.append("\n".join(f"- {remark}" for remark in remarks))
    return blocks


def _table(recipe: Recipe, model: ModelOutcome, failures: list[str]) -> str:
    tasks = list(dict.fromkeys(name for outcome in model.outcomes for name in outcome.accuracies()))
    texts = [text.name for text in model.model.evaluations]
    columns = ["removed", *(["KV bytes per token"] if recipe.kv else []), *texts, *tasks]
    if len(tasks) > 1:
        columns.append("mean accuracy")
    head = ["method", *(f"{_percent(ratio)}: {name}" for ratio in model.ratios for name in columns)]
    lines = [_line(head), "|" + "---|" * len(head)]
    dense = _values(recipe, model, model.dense, tasks, best={}, failures=failures)
    # The dense model has no ratio: its one row of figures stands in every column.
    lines.append(_line(["dense", *(dense * len(model.ratios))]))
    best = {
        (ratio, parts): _best(model, ratio, parts, tasks)
        for ratio in model.ratios
        for parts in {row.parts for row in model.rows}
    }
    for row in model.rows:
        cells = [model.label(row)]
        for ratio in model.ratios:
            outcome = row.cells.get(ratio)
            if outcome is None:
                cells += [""] * len(columns)
            else:
                cells += _values(
                    recipe, model, outcome, tasks, best=best[ratio, row.parts], failures=failures
                )
        lines.append(_line(cells))
    return "\n".join(lines)


def _values(
    recipe: Recipe,
    model: ModelOutcome,
    outcome: Outcome,
    tasks: Sequence[str],
    *,
    best: dict[str, float],
    failures: list[str],
) -> list[str]:
    """The columns of one cell."""
    width = 1 + recipe.kv + len(model.model.evaluations) + len(tasks) + (len(tasks) > 1)
    if outcome.error is not None:
        failures.append(f"{outcome.cell.describe()}: {outcome.error}")
        return [f"failed [{len(failures)}]", *["-"] * (width - 1)]
    if outcome.receipt is None:
        return ["not run", *["-"] * (width - 1)]
    values = [_removed(outcome)]
    if recipe.kv:
        values.append(f"{outcome.receipt['counts']['kv_bytes_per_token']:,}")
    for number, text in enumerate(model.model.evaluations):
        shown = number_text(outcome.perplexity(number))
        increase = model.increase(outcome, number)
        if outcome is not model.dense and increase is not None:
            shown += f" ({increase:+.2f})" if abs(increase) < 1000 else f" ({increase:+.2g})"
        values.append(_bold(shown, outcome.perplexity(number), best.get(text.name)))
    accuracies = outcome.accuracies()
    values += [_accuracy(accuracies.get(task), best.get(task)) for task in tasks]
    if len(tasks) > 1:
        values.append(_accuracy(mean_accuracy(outcome), best.get("mean accuracy")))
    return values


def _removed(outcome: Outcome) -> str:
    removed, zeros = outcome.removed(), outcome.removed("zeros")
    if removed is None:
        return "-"
    what = " of KV" if outcome.removed_of == "KV" else " as zeros" if zeros else ""
    return f"{_percent(removed)}{what}{f' {MISS}' if outcome.missed else ''}"


def _best(
    model: ModelOutcome, ratio: float, parts: tuple[str, ...], tasks: Sequence[str]
) -> dict[str, float]:
    """Column -> its best value among the rows that cut the same parts, where there are at least two."""
    outcomes = [row.cells[ratio] for row in model.rows if ratio in row.cells and row.parts == parts]
    best: dict[str, float] = {}
    for number, text in enumerate(model.model.evaluations):
        values = [v for outcome in outcomes if (v := outcome.perplexity(number)) is not None]
        if len(values) > 1:
            best[text.name] = min(values)
    for task in tasks:
        values = [v for outcome in outcomes if (v := outcome.accuracies().get(task)) is not None]
        if len(values) > 1:
            best[task] = max(values)
    means = [v for outcome in outcomes if (v := mean_accuracy(outcome)) is not None]
    if len(means) > 1:
        best["mean accuracy"] = max(means)
    return best


def mean_accuracy(outcome: Outcome) -> float | None:
    values = list(outcome.accuracies().values())
    return sum(values) / len(values) if values else None


def _remarks(model: ModelOutcome) -> list[str]:
    """What solvers noted, each remark with the rows it is about."""
    about: dict[str, list[str]] = {}
    for row in model.rows:
        for ratio, outcome in row.cells.items():
            for note in (outcome.receipt or {}).get("notes", ()):
                about.setdefault(note, []).append(f"{model.label(row)} at {_percent(ratio)}")
    return [f"{', '.join(rows)}: {note}" for note, rows in about.items()]


def _disagreements(model: ModelOutcome) -> list[str]:
    """Receipts of one table must be about one model and one text."""
    receipts = [outcome.receipt for outcome in model.outcomes if outcome.receipt is not None]
    found = []
    if len({receipt["model"]["fingerprint"] for receipt in receipts}) > 1:
        found.append("the receipts are not all of the same weights: the model changed between two runs")
    for number, text in enumerate(model.model.evaluations):
        if len({receipt["perplexity"][number]["token_hash"] for receipt in receipts}) > 1:
            found.append(f"{text.name}: the receipts were not all measured on the same tokens")
    return found


def provenance(models: Sequence[ModelOutcome]) -> str:
    """Where the numbers come from."""
    outcomes = [outcome for model in models for outcome in model.outcomes]
    receipts = [outcome.receipt["receipt"] for outcome in outcomes if outcome.receipt is not None]
    machines = sorted({r["hardware"]["gpu"] or r["hardware"]["cpu"] for r in receipts})
    commits = sorted({_short_commit(str(r["commit"])) for r in receipts})
    told = f"Made by `trisect compare` from {len(receipts)} of {len(outcomes)} receipts in `cells/`"
    if receipts:
        told += f"; measured on {', '.join(machines)}; commit {', '.join(commits)}"
    return f"{told}."


def _short_commit(commit: str) -> str:
    return commit[:12] + ("-dirty" if commit.endswith("-dirty") else "")


def number_text(value: float | None) -> str:
    """Two decimals while they mean something."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "inf"
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}" if value < 100_000 else f"{value:.2e}"


def _accuracy(value: float | None, best: float | None) -> str:
    return "-" if value is None else _bold(f"{value:.4f}", value, best)


def _bold(text: str, value: float | None, best: float | None) -> str:
    return f"**{text}**" if value is not None and value == best else text


def _percent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


__all__ = ["Row", "markdown", "mean_accuracy", "number_text", "provenance"]
