"""Prints what a compression did: the table, what the grid changed, the trials under a bound, the notes."""

import math
from typing import TYPE_CHECKING

from trisect.commands._screen import stdout

if TYPE_CHECKING:
    from rich.console import Console

    from trisect.pipeline.job import Result

UNREMARKABLE = ("full width", "folded")
"""Notes that a receipt keeps but nobody needs to read layer by layer."""
NOTABLE_MISS = 0.01
"""A distance between the ratio asked for and the one reached that a user should hear of."""


def show_result(result: "Result") -> None:
    """Print the final table, and what the solver wants the user to know."""
    from trisect.report.terminal import compression_table

    console = stdout()
    console.print(
        compression_table(result.before, result.after, losses=result.losses, perplexities=result.perplexities)
    )
    _show_ratio(result, console)
    _show_trials(result, console)
    for entry in result.losses:
        if entry["note"] and not entry["note"].startswith(UNREMARKABLE):
            console.print(f"layer {entry['layer']} {entry['component']}: {entry['note']}")


def _show_ratio(result: "Result", console: "Console") -> None:
    """What was removed, where that is not what was asked for; and why."""
    from trisect.models import zeros_of
    from trisect.plan import budget_of
    from trisect.records.shapes import COMPONENTS

    plan, removed = result.plan, result.receipt["ratio"]
    if plan.masked:
        zeros = zeros_of(result.model) / budget_of(result.before).linear_parameters
        console.print(f"{zeros:.1%} of the decoder's linear weights are zero now; no shape has changed.")
        return
    if any(linear.cached for linears in plan.linears for linear in linears):
        return  # the ratio was one of the cache, which the table shows
    if abs(plan.ratio - removed) > NOTABLE_MISS:
        recipe = result.receipt["recipe"]
        chosen = recipe["layers"] is not None or set(recipe["parts"]) != set(COMPONENTS)
        why = ["only the chosen parts and layers were cut"] if chosen else []
        if plan.align is not None:
            why.append(f"widths are multiples of {plan.align} (--align none: exact)")
        console.print(
            f"Asked for {plan.ratio:.1%}, removed {removed:.1%} of the decoder" + "".join(f"; {w}" for w in why)
        )


def _show_trials(result: "Result", console: "Console") -> None:
    """The copies that were tried under a bound on perplexity."""
    target = result.receipt.get("target")
    if target is None:
        return
    windows = target["held_out"]["windows"]
    console.print(f"Perplexity on {windows} held-out calibration windows may rise by {target['max_ppl_increase']}:")
    for trial in target["trials"]:
        verdict = "inside" if trial["inside"] else "outside"
        console.print(f"  {trial['ratio']:.1%} removed: x{math.exp(trial['rise']):.4f}, {verdict}")
