"""`trisect report`: one page about one run or several side by side."""

from itertools import count
from pathlib import Path
from typing import Annotated, Any

from trisect.commands import _screen as screen
from trisect.commands._options import Device, LoadOptions, argument, option, verb
from trisect.errors import TrisectError


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
    sample_tokens: Annotated[int, option("New tokens of each sample.", min=1)] = 64,
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
    from trisect.report import charts, collect, page
    from trisect.support.files import atomic_write_text

    page.check_outputs(out, figures)
    if not all(sample or ["none"]):
        raise TrisectError('A prompt is empty; give some words, e.g. --sample "Once upon a time".')
    with screen.quiet_libraries(), screen.progress() as report:
        found = collect.read_runs(runs, measured or [])
        known = None if curves is None else read_curves(curves)
        if known is not None and not any(charts.fits(known, each) for each in found):
            other = f"The loss curves in {curves} start at other widths than the models of these runs had"
            raise TrisectError(f"{other}; give those that were measured on their model, or leave --curves out.")
        loaded = count()

        def load(name: str) -> Any:
            report("samples", next(loaded), len(found) + 1)
            return screen.load(name, LoadOptions(device=device))

        texts = page.draw_samples(found, sample, new_tokens=sample_tokens, load=load) if sample else []
    sections = page.report_sections(found, curves=known, samples=texts)
    made = page.render(found, sections)
    if figures is not None:
        drawn = page.write_figures(figures, sections)
        screen.say(f"{len(drawn)} files of figures in {figures}")
    atomic_write_text(out, made)
    screen.say(f"Saved to {out}")
    screen.say_next(f"open {screen.quoted(out)} in a browser")
