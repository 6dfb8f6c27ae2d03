"""`trisect calibrate`: collect a method's moments once, to cut at any ratio later."""

from pathlib import Path
from typing import Annotated

from trisect.commands import _screen as screen
from trisect.commands._options import LoadOptions, Model, option
from trisect.config import CalibrationConfig

PANEL = "Compress"
EXAMPLES = (
    ("Collect once", "trisect calibrate smollm2-135m -o moments.safetensors"),
    (
        "... and cut at any ratio",
        "trisect compress smollm2-135m -o small --ratio 0.3 --method a3 --moments moments.safetensors",
    ),
    (
        "With your own text and fewer windows",
        "trisect calibrate models/llama -o moments.safetensors --calibration text.txt --samples 32",
    ),
)


def run(
    model: Model,
    settings: CalibrationConfig,
    out: Annotated[Path, option("E.g. moments.safetensors.", "FILE")],
    loading: LoadOptions,
    method: Annotated[str, option("Whose moments: `trisect ls methods`.", "NAME")] = "a3",
) -> None:
    """Run the calibration tokens through a model and save its moments."""
    from trisect.calibrate.texts import prepare
    from trisect.config import CompressConfig
    from trisect.methods import get_method
    from trisect.pipeline.statistics import calibrate, refuse_stored_moments
    from trisect.support.files import check_writable

    # Moments are the same for every ratio.
    config = CompressConfig(ratio=0.5, method=method, parts=get_method(method).parts, calibration=settings)
    refuse_stored_moments(get_method(method))
    check_writable(out)
    loaded = screen.load(model, loading)
    with screen.progress() as report:
        prepared = prepare(loaded.model, config, loaded.tokenizer, progress=report)
    screen.say(prepared.line(), *prepared.notes)
    with screen.progress() as report:
        info = calibrate(loaded.model, config, out, tokens=prepared.tokens, progress=report)
    screen.say(f"Moments of {info.num_tokens:,} tokens saved to {out}")
    cut = f"trisect compress {screen.quoted(model)} -o OUT --ratio 0.25"
    screen.say_next(f"{cut} --method {method} --moments {screen.quoted(out)}")
