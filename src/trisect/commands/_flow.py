"""What `compress` and `demo` share: measure, compress, measure again, and say what happened."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trisect.commands._screen import Report, hushed, of_stage, stdout

if TYPE_CHECKING:
    from rich.console import Console

    from trisect.calibrate.texts import Prepared
    from trisect.config import CompressConfig
    from trisect.data import Tokens
    from trisect.evaluate.perplexity import Perplexity
    from trisect.models import Loaded
    from trisect.pipeline.run import Compressed
    from trisect.records.shapes import ModelShape

UNREMARKABLE = ("full width", "folded")
"""Notes that a receipt keeps but nobody needs to read layer by layer."""
NOTABLE_MISS = 0.01
"""A distance between the ratio asked for and the one reached that a user should hear of."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A compressed model and the numbers on both sides of the cut."""

    compressed: "Compressed"
    before: "ModelShape"
    after: "ModelShape"
    perplexities: "list[tuple[Perplexity, Perplexity]]"
    """Before and after, on one text after the other."""

    def measured(self) -> dict[str, Any]:
        """The perplexities as JSON has them; the first also by itself, as older readers know it."""
        rows = [{"before": asdict(was), "after": asdict(now)} for was, now in self.perplexities]
        return {"perplexity": rows[0], "perplexities": rows} if rows else {}

    def to_dict(self) -> dict[str, Any]:
        """The measurement that `--json` writes."""
        from trisect.plan import budget_of, compare

        old, new = budget_of(self.before), budget_of(self.after)
        return {
            **compare(old, new).to_dict(),
            "before": old.to_dict(),
            "after": new.to_dict(),
            "plan": self.compressed.plan.to_dict(),
            "losses": self.compressed.losses,
            "receipt": self.compressed.receipt,
            **self.measured(),
        }

    def show(self) -> None:
        """Print the final table, and what the solver wants the user to know."""
        from trisect.report.terminal import compression_table

        rows = self.perplexities
        table = compression_table(self.before, self.after, losses=self.compressed.losses, perplexities=rows)
        console = stdout()
        console.print(table)
        self._say_what_the_grid_did(console)
        self._say_what_was_tried(console)
        for entry in self.compressed.losses:
            if entry["note"] and not entry["note"].startswith(UNREMARKABLE):
                console.print(f"layer {entry['layer']} {entry['component']}: {entry['note']}")

    def _say_what_the_grid_did(self, console: "Console") -> None:
        from trisect.models import zeros_of
        from trisect.plan import budget_of, compare
        from trisect.records.shapes import COMPONENTS

        plan = self.compressed.plan
        if plan.masked:
            zeros = zeros_of(self.compressed.model) / budget_of(self.before).linear_parameters
            console.print(f"{zeros:.1%} of the decoder's linear weights are zero now; no shape has changed.")
            return
        if any(linear.cached for linears in plan.linears for linear in linears):
            return  # the ratio was one of the cache, which the table shows
        removed = compare(budget_of(self.before), budget_of(self.after)).ratio
        if abs(plan.ratio - removed) > NOTABLE_MISS:
            recipe = self.compressed.receipt["recipe"]
            chosen = recipe["layers"] is not None or set(recipe["parts"]) != set(COMPONENTS)
            why = ["only the chosen parts and layers were cut"] if chosen else []
            if plan.align is not None:
                why.append(f"widths are multiples of {plan.align} (--align none: exact)")
            console.print(
                f"Asked for {plan.ratio:.1%}, removed {removed:.1%} of the decoder"
                + "".join(f"; {w}" for w in why)
            )

    def _say_what_was_tried(self, console: "Console") -> None:
        target = self.compressed.receipt.get("target")
        if target is None:
            return
        windows = target["held_out"]["windows"]
        console.print(
            f"Perplexity on {windows} held-out calibration windows may rise by {target['max_ppl_increase']}:"
        )
        for trial in target["trials"]:
            verdict = "inside" if trial["inside"] else "outside"
            console.print(f"  {trial['ratio']:.1%} removed: x{math.exp(trial['rise']):.4f}, {verdict}")


def load(
    name: str, *, dtype: str | None, device: str, trust_remote_code: bool, stream: str = "off"
) -> "Loaded":
    """Load a model with transformers' own chatter turned off."""
    from trisect.models import load_model

    with hushed():
        return load_model(
            name, dtype=dtype, device=device, trust_remote_code=trust_remote_code, stream=stream
        )


def say_text(prepared: "Prepared") -> None:
    """The first line of a run: what it calibrates on; and what of that could not be read."""
    for line in (prepared.line(), *prepared.notes):
        stdout().print(line, soft_wrap=True)


def compress_and_measure(
    loaded: "Loaded",
    config: "CompressConfig",
    *,
    evaluations: "Sequence[Tokens]",
    tokens: "Tokens | None",
    moments: Path | None = None,
    curves: Path | None = None,
    work: Path | None = None,
    report: Report,
) -> Outcome:
    """Compress, with perplexity before and after on each of the evaluation texts.

    In place, unless copies are tried to stay within a bound on perplexity.
    """
    from trisect.commands._outlook import say_outlook
    from trisect.evaluate.perplexity import perplexity
    from trisect.models import shape_of
    from trisect.pipeline.bounds import compress_within
    from trisect.pipeline.run import compress

    def measure(model: Any, when: str) -> "list[Perplexity]":
        stages = [of_stage(report, f"perplexity {when}, {text.source}") for text in evaluations]
        return [perplexity(model, text, progress=s) for text, s in zip(evaluations, stages, strict=True)]

    before = shape_of(loaded.model)
    later = say_outlook(before, config)
    was = measure(loaded.model, "before")
    given: dict[str, Any] = {"tokens": tokens, "curves": curves, "progress": report}
    if config.max_ppl_increase is None:
        compressed = compress(loaded.model, config, moments=moments, work=work, planned=later, **given)
    else:
        compressed = compress_within(loaded.model, config, **given)
    after, now = shape_of(compressed.model), measure(compressed.model, "after")
    both = list(zip(was, now, strict=True))
    return Outcome(compressed=compressed, before=before, after=after, perplexities=both)
