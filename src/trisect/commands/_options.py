"""Options that several verbs share: one spelling and one help text for each."""

from pathlib import Path
from typing import Annotated, Any

import typer

from trisect.commands._names import completed, model_names, one_of
from trisect.config.record import CUT, RUNNING

EVERYWHERE = "For every verb"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Hub id, folder, GGUF file, or a name from `trisect ls models`.",
        autocompletion=completed(model_names),
    ),
]
OutFolder = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="New folder.")]
BatchSize = Annotated[
    int | None, typer.Option(help="Windows per forward pass; chosen for you by default.", rich_help_panel=RUNNING)
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="float32, bfloat16 or float16; the checkpoint's own by default.",
        autocompletion=one_of("float32", "bfloat16", "float16"),
        rich_help_panel=RUNNING,
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="DEVICE", help="cpu, cuda, cuda:1, ...", autocompletion=one_of("cpu", "cuda"), rich_help_panel=RUNNING
    ),
]
Curves = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Loss curves for search and balanced: read, or measured and written.", rich_help_panel=CUT
    ),
]
Stream = Annotated[
    str,
    typer.Option(
        metavar="auto|on|off",
        help="Read layers one at a time; auto: where memory is short.",
        autocompletion=one_of("auto", "on", "off"),
        rich_help_panel=RUNNING,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that the checkpoint brings along.", rich_help_panel=RUNNING),
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the measurement as JSON.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Results only: no progress, no hints.", rich_help_panel=EVERYWHERE)
]


def given(**options: Any) -> dict[str, Any]:
    """The options that were typed or are in a file: None means "not given", so a default may decide."""
    return {name: value for name, value in options.items() if value is not None}
