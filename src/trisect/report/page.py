"""The page: one HTML file that needs nothing else, and runs no script but its own."""

import base64
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.resources import files

from trisect.plan.curves import Curves
from trisect.report import figures, relations, sections
from trisect.report.cells import plain_table, prose
from trisect.report.drawing import Bars, Chart, Figure, HeatMap
from trisect.report.headline import headline
from trisect.report.markup import Markup, tag
from trisect.report.records import Run, Sample
from trisect.report.spectra import spectrum_charts
from trisect.report.svg import svg

TOGGLED = 10
"""Series that are worth a button each."""


NARROW = 14
"""Layers of a heat map that fit into half of the page."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page with its own heading."""

    key: str
    """Of its link."""
    title: str
    figures: tuple[Figure, ...] = ()
    text: Markup | None = None
    missing: str = ""
    """What to say where there is nothing to show."""


def report_sections(
    runs: Sequence[Run],
    *,
    curves: Curves | None = None,
    samples: Sequence[Sample] = (),
    layers: Collection[int] | None = None,
) -> list[Section]:
    """All that the page has to say, in order; `layers` are those whose spectra are shown."""
    maps = [drawn for run in runs for drawn in (figures.plan_map(run), figures.loss_map(run))]
    searched = [drawn for run in runs for drawn in (figures.trial_chart(run), figures.tuning_chart(run))]
    predicted = None if curves is None else relations.prediction_chart(curves, runs)
    several = len(runs) > 1
    return [
        Section(key="headline", title="Before and after", text=headline(runs)),
        *([Section(key="runs", title="Runs", text=sections.run_table(runs))] if several else []),
        Section(key="plan", title="The plan", figures=_there(maps), text=sections.notes(runs)),
        Section(
            key="spectra",
            title="Spectra",
            figures=tuple(chart for run in runs for chart in spectrum_charts(run, layers)),
            missing="The receipts have no spectra: only solvers that cut by one record it.",
        ),
        Section(
            key="curves",
            title="Loss curves",
            figures=() if curves is None else tuple(relations.curve_charts(curves, runs)),
            missing="No loss curves were given. `trisect compress --allocate balanced --curves FILE` "
            "measures them, and `trisect report --curves FILE` shows them.",
        ),
        Section(
            key="prediction",
            title="Predicted and measured",
            figures=_there([predicted]),
            missing="This needs loss curves (--curves FILE) that reach down to the widths of a run, and the "
            "perplexity of that run and of the dense model on the same text.",
        ),
        *(
            [Section(key="search", title="Search and tuning", figures=found)]
            if (found := _there(searched))
            else []
        ),
        Section(
            key="time",
            title="Time",
            figures=_there([figures.time_bars(runs)]),
            missing="The receipts have no times.",
        ),
        *(
            [
                Section(
                    key="pareto",
                    title="What is worth its size",
                    figures=tuple(relations.pareto_charts(runs)),
                    missing="Fewer than two runs have perplexities on the same text.",
                )
            ]
            if several
            else []
        ),
        Section(
            key="samples",
            title="Samples",
            text=sections.samples(samples) if samples else None,
            missing="No prompts were given: `trisect report --sample PROMPT` lets the models go on from one.",
        ),
        Section(key="calibration", title="Calibration and provenance", text=sections.calibration(runs)),
        Section(key="receipts", title="Receipts", text=sections.receipts(runs)),
    ]


def all_figures(found: Sequence[Section]) -> list[Figure]:
    return [figure for section in found for figure in section.figures]


def render(runs: Sequence[Run], found: Sequence[Section]) -> str:
    """The whole page; the same input gives the same bytes."""
    style, script = (_asset(name) for name in ("page.css", "page.js"))
    title = f"trisect report: {', '.join(run.name for run in runs)}"
    links = [tag("li", tag("a", section.title, href=f"#{section.key}")) for section in found]
    page = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", http_equiv="Content-Security-Policy", content=content_policy(script)),
            tag("title", title),
            tag("style", style),
        ),
        tag(
            "body",
            tag("a", "Skip to the report", href="#headline", class_="skip"),
            tag("header", tag("h1", title), tag("nav", tag("ul", *links), aria_label="Sections"), id="top"),
            tag("main", *map(_section, found)),
            tag("script", script),
        ),
        lang="en",
    )
    return f"<!doctype html>\n{page}\n"


def content_policy(script: str) -> str:
    """Nothing is fetched, and no script runs but this one: even text that was not escaped could not act."""
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _section(section: Section) -> Markup:
    nothing = section.text is None and not section.figures
    return tag(
        "section",
        tag("h2", section.title),
        tag("p", *prose(section.missing), class_="none") if nothing else None,
        tag("div", *map(_figure, section.figures), class_="grid") if section.figures else None,
        section.text,
        id=section.key,
    )


def _figure(figure: Figure) -> Markup:
    assert isinstance(figure, Chart | HeatMap | Bars)
    header, rows = figure.table()
    data = tag("details", tag("summary", "Data"), plain_table(header, rows))
    return tag(
        "figure",
        tag("div", svg(figure), class_="drawing", tabindex="0"),
        _toggles(figure),
        tag("figcaption", figure.caption),
        data,
        data_name=figure.name,
        class_="wide" if isinstance(figure, HeatMap) and figure.columns > NARROW else None,
    )


def _toggles(figure: Figure) -> Markup | None:
    """A button per series; without scripts they stay hidden."""
    labels: Sequence[str] = ()
    if isinstance(figure, Chart):
        labels = [series.label for series in figure.series if series.depth is None]
    if not 2 <= len(labels) <= TOGGLED:
        return None
    buttons = [
        tag("button", label, type="button", aria_pressed="true", data_toggle=number)
        for number, label in enumerate(labels)
    ]
    return tag("div", *buttons, class_="toggles", role="group", aria_label="Show or hide", hidden="")


def _asset(name: str) -> Markup:
    return Markup(files("trisect.report").joinpath("assets", name).read_text(encoding="utf-8"))


def _there(found: Sequence[Figure | None]) -> tuple[Figure, ...]:
    return tuple(figure for figure in found if figure is not None)
