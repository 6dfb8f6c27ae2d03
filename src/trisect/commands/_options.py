"""Options that several verbs share: one spelling and one help text for each."""

from pathlib import Path
from typing import Annotated, Any

import typer

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Hub id, folder, GGUF file, or a name from `trisect ls models`."),
]
Calibration = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Calibration text: `trisect ls data`, or a file. (default: builtin)",
    ),
]
Samples = Annotated[int | None, typer.Option(help="Calibration windows. (default: 128)")]
Length = Annotated[int | None, typer.Option(help="Tokens per calibration window. (default: 2048)")]
Sampling = Annotated[
    str | None,
    typer.Option(metavar="random|first", help="Which windows are taken. (default: random)"),
]
Seed = Annotated[int | None, typer.Option(help="Seed of the random windows. (default: 0)")]
BatchSize = Annotated[int | None, typer.Option(help="Windows per forward pass; chosen for you by default.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's own by default.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Stream = Annotated[
    str,
    typer.Option(metavar="auto|on|off", help="Read layers one at a time; auto: where memory is short."),
]
States = Annotated[
    str | None,
    typer.Option(metavar="auto|device|host|disk", help="Where hidden states are kept. (default: auto)"),
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the measurement as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, results only.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the checkpoint brings along.")
]


def given(**options: Any) -> dict[str, Any]:
    """The options that were typed: None means "not given", so a file or a default may decide."""
    return {name: value for name, value in options.items() if value is not None}
