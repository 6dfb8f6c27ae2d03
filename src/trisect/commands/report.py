"""`trisect report`: one page about one run or several side by side."""

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trisect.commands import _screen as screen
from trisect.commands._options import Device, LoadOptions, argument, option, verb
from trisect.errors import TrisectError

if TYPE_CHECKING:
    from trisect.report.page import Sample
    from trisect.report.records import Run


@verb("Measure")
def run(
    runs: Annotated[list[Path], argument("Folders that `trisect compress -o` wrote.", "RUN")],
    out: Annotated[Path, option("The page.", "FILE")] = Path("report.html"),
    measured: Annotated[
        list[Path] | None,
        option(
            "What --json of eval, bench, compress or quantize wrote, about a run or the model it came "
            "from. Files in RUN/measurements are read anyway.",
            "FILE",
        ),
    ] = None,
    curves: Annotated[Path | None, option("Loss curves, from `trisect compress --curves`.", "FILE")] = None,
    sample: Annotated[
        list[str] | None, option("Load the models and let them go on from this text, greedily.", "PROMPT")
    ] = None,
    sample_tokens: Annotated[int, option("New tokens of each sample.")] = 64,
    figures: Annotated[
        Path | None, option("Also every figure as SVG and PNG (pip install 'trisect[plots]').", "DIR")
    ] = None,
    device: Device = "cpu",
) -> None:
    """Write one self-contained page: what went, what it cost, where the time went, and every receipt.

    One page about a run: trisect report small -o report.html
    Two runs side by side, with what was measured later:
        trisect report small smaller --measured eval.json --figures figures
    What the models write: trisect report small --sample 'A function in Python is'
    """
    from trisect.plan import read_curves
    from trisect.report.charts import fits
    from trisect.report.collect import read_runs
    from trisect.report.page import check_outputs, check_samples, render, report_sections, write_figures
    from trisect.support.files import atomic_write_text

    check_outputs(out, figures)
    check_samples(sample or [], sample_tokens)
    with screen.quiet_libraries():
        found = read_runs(runs, measured or [])
        known = None if curves is None else read_curves(curves)
        if known is not None and not any(fits(known, each) for each in found):
            raise TrisectError(
                f"The loss curves in {curves} start at other widths than the models of these runs had; "
                "give those that were measured on their model, or leave --curves out."
            )
        texts = _samples(found, sample or [], sample_tokens, device=device)
    sections = report_sections(found, curves=known, samples=texts)
    page = render(found, sections)
    if figures is not None:
        drawn = write_figures(figures, sections)
        screen.say(f"{len(drawn)} files of figures in {figures}")
    atomic_write_text(out, page)
    screen.say_saved(out)
    screen.say_next(f"open {screen.quoted(out)} in a browser")


def _samples(runs: "list[Run]", prompts: list[str], new_tokens: int, *, device: str) -> "list[Sample]":
    from trisect.report.page import draw_samples

    if not prompts:
        return []
    with screen.progress() as report:
        loaded = count()

        def load(name: str) -> Any:
            report("samples", next(loaded), len(runs) + 1)
            return screen.load(name, LoadOptions(device=device))

        return draw_samples(runs, prompts, new_tokens=new_tokens, load=load)
