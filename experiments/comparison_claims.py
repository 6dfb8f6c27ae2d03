"""What comparisons were to show, and where they do not."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tables import targets, verdict

from trisect.compare.outcomes import ModelOutcome

if TYPE_CHECKING:
    from comparison_tables import Comparison

OURS = ("a3", "a3+")
CACHE_ORDERS = {
    "as the methods are": ("a3", "palu", "clover"),
    "uniform": ("a3", "palu uniform", "clover"),
    "searched": ("a3 search", "palu"),
}
"""How widths are spread -> labels in the paper's order."""
BASELINES = ("svd", "fwsvd", "asvd", "svd-llm", "svd-llm-v2")


def shortfalls(entry: "Comparison") -> list[str]:
    """Lines for the page; a recipe that nothing was asked of has none."""
    told = next((lines for start, lines in CLAIMS.items() if entry.name.startswith(start)), None)
    return [] if told is None else [line for model in entry.models for line in told(model)]


def perplexities(model: ModelOutcome, ratio: float) -> dict[str, float]:
    """Label -> perplexity on the first text, of rows that were run at a ratio."""
    cells = {model.label(row): row.cells[ratio].perplexity(0) for row in model.rows if ratio in row.cells}
    return {label: value for label, value in cells.items() if value is not None}


def _baselines(model: ModelOutcome) -> list[str]:
    """At equal parameters a3 was to beat every baseline."""
    lines = []
    for ratio in model.ratios:
        values = perplexities(model, ratio)
        if "a3" in values:
            ahead = [name for name in BASELINES if name in values and values[name] < values["a3"]]
            told = f"better than a3: **{', '.join(ahead)}**" if ahead else "no baseline is better than a3"
            lines.append(f"{model.model.name} at {ratio:.0%}: {told}.")
    return lines


def _cache_order(model: ModelOutcome) -> list[str]:
    """In the paper a3 is better than palu, and palu better than clover, at every ratio.

    Palu spreads its ranks over the model by a search. Beside it stand both with uniform widths, and both with
    a search.
    """
    lines = []
    for ratio in model.ratios:
        values = perplexities(model, ratio)
        for kind, names in CACHE_ORDERS.items():
            if set(names) <= values.keys():
                order = sorted(names, key=lambda name: values[name])
                same = order == list(names)
                told = f"{', '.join(order)}, {'as' if same else '**not as**'} in the paper"
                lines.append(f"At {ratio:.0%}, {kind}: {told}.")
    return lines


def _share_of_a3(model: ModelOutcome) -> list[str]:
    """a3+ was to have a share of the paper's increase at a quarter."""
    limit, lines = targets()["a3plus_stories_share"], []
    values, dense = perplexities(model, 0.25), model.dense.perplexity(0)
    if dense is not None and "a3" in values and model.model.name.startswith("stories"):
        for name in (name for name in values if name.startswith("a3+")):
            share = (values[name] - dense) / (values["a3"] - dense)
            told = verdict(share, limit, shown=f"{share:.2f}", asked=f"{limit:g}")
            lines.append(f"{model.model.name}, {name} at {0.25:.0%}: {told} of a3's increase.")
    return lines


def _reference(model: ModelOutcome) -> list[str]:
    """SVD-LLM was to give the reference figures."""
    asked, within = targets()["svd_llm_core"], targets()["svd_llm_within"]
    lines = []
    for ratio in model.ratios:
        value = perplexities(model, ratio).get("svd-llm")
        if value is not None and f"{ratio:g}" in asked:
            apart = abs(value / asked[f"{ratio:g}"] - 1)
            told = verdict(apart, within, shown=f"{apart:.2%}", asked=f"{within:.0%}")
            lines.append(f"At {ratio:.1%}, from the reference {asked[f'{ratio:g}']:.2f}: {told}.")
    return lines


CLAIMS: dict[str, Callable[[ModelOutcome], list[str]]] = {
    "main-": _baselines,
    "kv-": _cache_order,
    "pieces": _share_of_a3,
    "svd-llm-core": _reference,
}
"""How the name of a recipe begins -> what was asked of it."""
