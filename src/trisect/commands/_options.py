"""Options that several verbs share: one spelling and one help text for each."""

from pathlib import Path
from typing import Annotated, Any

import typer

from trisect.commands._names import completed, data_names, model_names, one_of

CALIBRATION, RUNNING, EVERYWHERE = "Calibration", "Running", "For every verb"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Hub id, folder, GGUF file, or a name from `trisect ls models`.",
        autocompletion=completed(model_names),
    ),
]
OutFolder = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="New folder.")]
Calibration = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Calibration text: `trisect ls data`, or a file; several times for a mixture, also a:0.7+b:0.3. "
        "(default: c4+fineweb-edu+wikipedia from the hub, else a stopgap)",
        autocompletion=completed(data_names),
        rich_help_panel=CALIBRATION,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        help="Calibration windows. (default: 256; on a CPU fewer, the larger the model)",
        rich_help_panel=CALIBRATION,
    ),
]
Length = Annotated[
    int | None,
    typer.Option(
        help="Tokens per calibration window. (default: 2048, or the model's context)",
        rich_help_panel=CALIBRATION,
    ),
]
Sampling = Annotated[
    str | None,
    typer.Option(
        metavar="random|first",
        help="Which windows are taken. (default: random)",
        autocompletion=one_of("random", "first"),
        rich_help_panel=CALIBRATION,
    ),
]
Seed = Annotated[
    int | None, typer.Option(help="Seed of the random windows. (default: 0)", rich_help_panel=CALIBRATION)
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Windows per forward pass; chosen for you by default.", rich_help_panel=RUNNING),
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
        metavar="DEVICE",
        help="cpu, cuda, cuda:1, ...",
        autocompletion=one_of("cpu", "cuda"),
        rich_help_panel=RUNNING,
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
States = Annotated[
    str | None,
    typer.Option(
        metavar="auto|device|host|disk",
        help="Where hidden states are kept. (default: auto)",
        autocompletion=one_of("auto", "device", "host", "disk"),
        rich_help_panel=RUNNING,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run code that the checkpoint brings along.", rich_help_panel=RUNNING
    ),
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the measurement as JSON.")]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Results only: no progress, no hints.", rich_help_panel=EVERYWHERE),
]


def given(**options: Any) -> dict[str, Any]:
    """The options that were typed or are in a file: None means "not given", so a default may decide."""
    return {name: value for name, value in options.items() if value is not None}
