"""`trisect sample`: synthetic text, written by the model itself, to calibrate on."""

from pathlib import Path
from typing import Annotated, Any

import typer

from trisect.commands import _options as options

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
    model: options.Model,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="New file, e.g. own.jsonl.")],
    samples: Annotated[int, typer.Option(help="Texts.")] = 128,
    length: Annotated[
        int | None, typer.Option(help="Tokens per text. (default: 2048, or the model's context)")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="1: the model's own distribution; less: what it finds likelier.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Other seeds give other texts.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Texts at once; decides about the texts, too.")] = 32,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    quiet: options.Quiet = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Let a model write synthetic text to calibrate on."""
    from trisect.calibrate.synthetic import SampleConfig, check_output, write_synthetic
    from trisect.calibrate.texts import usual_length
    from trisect.commands._screen import load, of_stage, progress, quoted, say_next, stdout

    chosen: dict[str, Any] = {"samples": samples, "temperature": temperature}
    chosen |= {"seed": seed, "batch_size": batch_size}
    SampleConfig(**chosen, **options.given(length=length))
    check_output(out)
    loaded = load(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    config = SampleConfig(**chosen, length=length or usual_length(loaded.model))
    with progress(quiet=quiet) as report:
        stage = of_stage(report, "tokens")
        write_synthetic(loaded.model, loaded.tokenizer, config, out, name=model, progress=stage)
    count = config.samples * config.length
    stdout().print(f"{config.samples} texts, {count:,} tokens, saved to {out}", soft_wrap=True)
    cut = f"trisect compress {quoted(model)} -o OUT --ratio 0.25"
    say_next(f"{cut} --calibration {quoted(out)}", quiet=quiet)
