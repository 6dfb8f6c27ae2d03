"""`trisect calibrate`: moments collected once, to cut at any ratio; `trisect sample`: text to calibrate on."""

from functools import partial
from pathlib import Path
from typing import Annotated

from trisect.commands import _screen as screen
from trisect.commands._options import LoadOptions, Model, option, verb
from trisect.config import CalibrationConfig, CompressConfig, verbs


@verb("Compress")
def calibrate(
    model: Model,
    settings: CalibrationConfig,
    out: Annotated[Path, option("E.g. moments.safetensors.", "FILE")],
    loading: LoadOptions,
    method: Annotated[str, option("Whose moments: `trisect ls methods`.", "NAME")] = "a3",
) -> None:
    """Run the calibration tokens through a model and save its moments.

    Collect once: trisect calibrate smollm2-135m -o moments.safetensors
    ... and cut at any ratio:
        trisect compress smollm2-135m -o small --ratio 0.3 --method a3 --moments moments.safetensors
    With your own text and fewer windows:
        trisect calibrate models/llama -o moments.safetensors --calibration text.txt --samples 32
    """
    from trisect.calibrate.texts import prepare
    from trisect.methods import get_method
    from trisect.pipeline import statistics
    from trisect.support.files import check_writable

    # Moments are the same for every ratio.
    config = CompressConfig(ratio=0.5, method=method, parts=get_method(method).parts, calibration=settings)
    statistics.refuse_stored_moments(get_method(method))
    check_writable(out)
    loaded = screen.load(model, loading)
    with screen.progress() as report:
        prepared = prepare(loaded.model, config, loaded.tokenizer, progress=report)
    screen.say(prepared.line(), *prepared.notes)
    with screen.progress() as report:
        info = statistics.calibrate(loaded.model, config, out, tokens=prepared.tokens, progress=report)
    screen.say(f"Moments of {info.num_tokens:,} tokens saved to {out}")
    cut = f"trisect compress {screen.quoted(model)} -o OUT --ratio 0.25"
    screen.say_next(f"{cut} --method {method} --moments {screen.quoted(out)}")


@verb("Compress")
def sample(
    model: Model,
    out: Annotated[Path, option("New file, e.g. own.jsonl.", "FILE")],
    settings: verbs.SampleConfig,
    loading: LoadOptions,
) -> None:
    """Let a model write synthetic text to calibrate on.

    Synthetic text: trisect sample smollm2-135m -o own.jsonl --device cuda
    ... alone, or beside yours:
        trisect compress smollm2-135m -o small --ratio 0.25 --calibration text.txt:0.5+own.jsonl:0.5
    Less, for a CPU: trisect sample smollm2-135m -o own.jsonl --samples 32 --length 512
    """
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
