"""The page: one HTML file that needs nothing else, and runs no script but its own.

Sections are plain data; `assets/page.html` turns them into markup and escapes every text.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from rich.filesize import decimal

from trisect.errors import TrisectError
from trisect.plan.budget import budget_of, compare
from trisect.report import charts, terminal
from trisect.report.runs import LEADING_SIZES, PERPLEXITY, SIZE, SPEED, TASK, Fact, Quantity, Run
from trisect.support import files, plots
from trisect.support.receipt import Receipt

HINTS = {  # how to measure what was not
    PERPLEXITY: ("perplexity", "`trisect eval MODEL --data wikitext2 --json F` for the run and its original"),
    TASK: ("tasks", "`trisect eval MODEL --tasks quick --json F` for the run and its original"),
    SPEED: ("speed", "`trisect bench RUN --json F`"),
}
CERTAIN = 2.0  # standard errors that a difference must exceed before it is called better or worse
CALIBRATION = ("source", "samples", "length", "sampling", "seed")
PROVENANCE = ("date", "trisect", "commit", "python", "token_hash")


class ShownChange(NamedTuple):
    """How a quantity moved, in words, and whether that is for the better."""

    text: str
    css: str  # better or worse; open where it may be chance
    error: str = ""


class Section(NamedTuple):
    """A part of the page with its own heading; one that has nothing is left out."""

    title: str
    content: Any = None  # what the template shows below the figures
    figures: Sequence[plots.Figure] = ()


def report_sections(runs: Sequence[Run]) -> dict[str, Section]:
    """All that the page has to say, by the name of its link."""
    maps: list[plots.Figure] = []
    for run in runs:
        title = f"{run.name}: what each layer keeps"
        plan = charts.plan_map(run.before, run.after, name=f"plan-{run.name}", title=title)
        maps += [plan, *charts.loss_map(run)]
    spectra = [chart for run in runs for chart in charts.spectrum_charts(run)]
    tunings = [chart for run in runs for chart in charts.tuning_chart(run)]
    losses = [(run.name, loss) for run in runs for loss in run.compression.losses if loss.note]
    notes = [(name, loss.layer, loss.component.upper(), loss.note) for name, loss in losses]
    found = {
        "headline": Section("Before and after", runs),
        "runs": Section("Runs", runs),
        "plan": Section("The plan", notes, maps),
        "spectra": Section("Spectra", figures=spectra),
        "tuning": Section("Tuning", figures=tunings),
        "time": Section("Time", _by_run([run.timings for run in runs])),
        "calibration": Section("Calibration and provenance", _by_run([*map(_provenance, runs)])),
        "receipts": Section("Receipts", runs),
    }
    if len(runs) == 1:
        del found["runs"]
    return {key: section for key, section in found.items() if section.content or section.figures}


def _by_run(facts: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Rows of a name and a value per run."""
    names = dict.fromkeys(name for one in facts for name in one)
    return [[name, *(one.get(name, "-") for one in facts)] for name in names]


def render(runs: Sequence[Run], sections: Mapping[str, Section]) -> str:
    """The whole page; the same input gives the same bytes."""
    from markupsafe import Markup

    style, script = (Markup(_asset(name)) for name in ("page.css", "page.js"))
    quantities = list(dict.fromkeys(fact.quantity for run in runs for fact in run.facts))
    # What two runs or more were measured by; of many tasks only the last, which is their average.
    known = [each for each in quantities if sum(run.fact(each).after is not None for run in runs) > 1]
    left_out = [each for each in known if each.kind == TASK][:-1]
    left_out += [each for each in known if each.kind == SIZE]
    text: str = _template().render(
        title=f"trisect report: {', '.join(run.name for run in runs)}",
        policy=content_policy(script),
        style=style,
        script=script,
        runs=runs,
        sections=sections,
        quantities=quantities,
        hints=[hint for kind, hint in HINTS.items() if kind not in {each.kind for each in quantities}],
        compared=[each for each in known if each not in left_out],
        has_figures=plots.has_matplotlib(),
        drawing=lambda figure: Markup(plots.svg(figure, themed=True)),
    )
    return f"{text.strip()}\n"


def change_of(fact: Fact) -> ShownChange | None:
    """Sizes by how much went, scores by their difference, the others by a factor."""
    if fact.before is None or fact.after is None or fact.before == 0:
        return None
    kind, difference = fact.quantity.kind, fact.after - fact.before
    rises = kind in (TASK, SPEED)
    css = "better" if (difference >= 0 if rises else difference <= 0) else "worse"
    if kind == SIZE:
        return ShownChange(f"{100 * (fact.after / fact.before - 1):+.1f}%", css)
    if kind != TASK:
        return ShownChange(f"x{fact.after / fact.before:.3f}", css)
    if fact.error is None:
        return ShownChange(f"{difference:+.4f}", css)
    certain = abs(difference) > CERTAIN * fact.error
    return ShownChange(f"{difference:+.4f}", css if certain else "open", f"+-{fact.error:.4f}")


def leading_facts(run: Run) -> list[Fact]:
    """The sizes that people pay for, the first text, the tasks' average (or the only task), the speeds."""
    kinds = {kind: [fact for fact in run.facts if fact.quantity.kind == kind] for kind in (*HINTS, SIZE)}
    sizes = [fact for fact in kinds[SIZE] if fact.quantity in LEADING_SIZES]
    facts = [*sizes, *kinds[PERPLEXITY][:1], *kinds[TASK][-1:], *kinds[SPEED]]
    return [fact for fact in facts if change_of(fact) is not None]


def shown_value(value: float, quantity: Quantity) -> str:
    """A number in the digits that its kind is read in."""
    if quantity.kind == PERPLEXITY:
        return f"{value:,.3f}"
    if quantity.kind == TASK:
        return f"{value:.4f}"
    if quantity.kind == SPEED:
        return f"{value:,.1f} {quantity.unit}"
    if quantity.unit == "B":
        return decimal(round(value), precision=2)
    return terminal.count(value) if value >= 1e3 else terminal.short(value)


def _provenance(run: Run) -> dict[str, str]:
    """What the solvers saw, and what ran."""
    receipt = run.compression
    chosen = receipt.recipe.get("calibration")
    data = chosen if isinstance(chosen, dict) else {}
    values: dict[str, Any] = {f"calibration {key}": data.get(key) for key in CALIBRATION}
    values |= {key.replace("_", " "): receipt.whole.get(key) for key in PROVENANCE}
    values |= {**receipt.versions, **receipt.hardware}
    values["fine-tuned"] = f"{len(run.tunings)} times" if run.tunings else None
    return {key: str(value) for key, value in values.items() if value is not None}


def receipt_text(receipt: Receipt) -> str:
    """JSON with a line for every entry, and one line for a list of numbers."""
    text = json.dumps(receipt.whole, indent=2)
    # A line break in a text is written as two letters, so this one is never inside of it.
    return re.sub(r"\[\n[-+.,\w\s]*\]", lambda found: " ".join(found[0].split()), text)


def content_policy(script: str) -> str:
    """Nothing is fetched, and no script runs but this one: even text that was not escaped could not act."""
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    own = f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"default-src 'none'; {own}; base-uri 'none'; form-action 'none'"


def check_output(page: Path) -> None:
    """Refuse a page that cannot be written, or that would be put over something else."""
    if page.suffix.lower() not in (".html", ".htm"):
        raise TrisectError(f"The report is a page, so {page.name!r} should end in .html: -o {page.stem}.html.")
    files.check_writable(page)


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    spaces: Any = {"trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(autoescape=True, undefined=StrictUndefined, finalize=_writable, **spaces)
    functions = (change_of, terminal.count, leading_facts, receipt_text, terminal.short, shown_value)
    environment.globals |= {function.__name__: function for function in functions}
    environment.globals |= {"budget_of": budget_of, "compare": compare}
    return environment.from_string(_asset("page.html"))


def _writable(value: Any) -> Any:
    """Text without what HTML cannot hold."""
    plain = isinstance(value, str) and not hasattr(value, "__html__")
    return plots.UNWRITABLE.sub("\ufffd", value) if plain else value


def _asset(name: str) -> str:
    return resources.files("trisect.report").joinpath("assets", name).read_text(encoding="utf-8")
