"""`trisect eval`: the perplexity of a model on a text."""

from dataclasses import asdict
from typing import Annotated

import typer

from trisect.commands import _options as options


def run(
    model: options.Model,
    data: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Text: `trisect ls data`, or a file.")
    ] = "builtin",
    length: Annotated[int, typer.Option(help="Tokens per window.")] = 2048,
    windows: Annotated[int | None, typer.Option(help="Number of windows. (default: all)")] = None,
    sampling: Annotated[str, typer.Option(metavar="random|first", help="Which windows are taken.")] = "first",
    seed: Annotated[int, typer.Option(help="Seed of random windows.")] = 0,
    batch_size: options.BatchSize = None,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    json: options.Json = None,
    quiet: options.Quiet = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Measure the perplexity of a model on a text."""
    from trisect.commands._flow import load
    from trisect.commands._screen import of_stage, progress, stdout
    from trisect.data import load_tokens
    from trisect.evaluate.perplexity import perplexity
    from trisect.files import check_writable, write_json

    if json is not None:
        check_writable(json)
    loaded = load(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    tokens = load_tokens(
        data,
        loaded.tokenizer,
        samples=windows,
        length=length,
        sampling=sampling,
        seed=seed,
        split="evaluation",
    )
    with progress(quiet=quiet) as report:
        result = perplexity(
            loaded.model, tokens, batch_size=batch_size, progress=of_stage(report, "perplexity")
        )
    stdout().print(
        f"perplexity {result.perplexity:.4f} on {result.data} "
        f"({result.windows} windows of {result.length} tokens)",
        soft_wrap=True,
    )
    if json is not None:
        write_json(json, {"model": model, **asdict(result)})
