"""`trisect sample`: synthetic text, written by the model itself, to calibrate on."""

from functools import partial
from pathlib import Path
from typing import Annotated

from trisect.commands import _screen as screen
from trisect.commands._options import LoadOptions, Model, option
from trisect.config.verbs import SampleConfig

PANEL = "Compress"
EXAMPLES = (
    ("Synthetic text", "trisect sample smollm2-135m -o own.jsonl --device cuda"),
    (
        "... alone, or beside yours",
        "trisect compress smollm2-135m -o small --ratio 0.25 --calibration text.txt:0.5+own.jsonl:0.5",
    ),
    ("Less, for a CPU", "trisect sample smollm2-135m -o own.jsonl --samples 32 --length 512"),
)


def run(
    model: Model,
    out: Annotated[Path, option("New file, e.g. own.jsonl.", "FILE")],
    settings: SampleConfig,
    loading: LoadOptions,
) -> None:
    """Let a model write synthetic text to calibrate on."""
    from trisect.calibrate.synthetic import check_output, write_synthetic

    check_output(out)
    loaded = screen.load(model, loading)
    with screen.progress() as report:
        stage = partial(report, "tokens")
        written = write_synthetic(loaded.model, loaded.tokenizer, settings, out, name=model, progress=stage)
    count = settings.samples * written["recipe"]["length"]
    screen.say(f"{settings.samples} texts, {count:,} tokens, saved to {out}")
    cut = f"trisect compress {screen.quoted(model)} -o OUT --ratio 0.25"
    screen.say_next(f"{cut} --calibration {screen.quoted(out)}")
