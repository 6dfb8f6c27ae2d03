"""What `compress` and `plan` share: the options that make a configuration."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trisect.errors import TrisectError

if TYPE_CHECKING:
    from trisect.config import CompressConfig

Ratio = Annotated[float | None, typer.Option(help="Fraction of the decoder's weights to remove, e.g. 0.25.")]
KvRatio = Annotated[
    float | None, typer.Option(help="Instead: fraction of the KV cache to remove, from attention alone.")
]
TargetParams = Annotated[
    str | None, typer.Option(metavar="N", help="Instead: parameters of the whole model, e.g. 100M or 1.2B.")
]
TargetKvBytes = Annotated[
    str | None,
    typer.Option(metavar="N", help="Instead: KV cache bytes per token, e.g. 20K (20,000) or 20KiB (20,480)."),
]
MaxPplIncrease = Annotated[
    str | None,
    typer.Option(
        metavar="5%|1.5",
        help="Instead: the smallest model whose perplexity on held-out calibration windows rises by no more.",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(metavar="params|kv|flops|latency", help="What --ratio is a fraction of. (default: params)"),
]
LatencyTable = Annotated[
    str | None, typer.Option(metavar="FILE", help="Measured times, for --budget latency.")
]
Floor = Annotated[
    str | None,
    typer.Option(metavar="SHARE", help="Of its width that nothing goes below: 0.25, or qk=0.5,mlp=0.3."),
]
Method = Annotated[str | None, typer.Option(help="See `trisect ls methods`. (default: a3+)")]
Parts = Annotated[str | None, typer.Option(metavar="LIST", help="What to narrow. (default: qk,ov,mlp)")]
Layers = Annotated[str | None, typer.Option(metavar="LIST", help="E.g. 4-27 or 0,3,5-7. (default: all)")]
Align = Annotated[
    str | None,
    typer.Option(metavar="16|8|none", help="Head widths in multiples; none = exact. (default: 16)"),
]
Allocate = Annotated[
    str | None,
    typer.Option(
        metavar="uniform|search|balanced",
        help="Widths: the same share off each; by loss curves per layer; or per layer and part.",
    ),
]
Curves = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Loss curves for search and balanced: read, or measured and written."),
]
RopeScope = Annotated[
    str | None,
    typer.Option(
        metavar="head|layer|model", help="Who shares one set of RoPE frequencies, in a3+. (default: head)"
    ),
]
Portable = Annotated[
    bool | None,
    typer.Option(
        "--portable",
        help="For `trisect export` without padding: --rope-scope model, one head width that kernels know "
        "(multiples of 16 from half the old width on), one MLP width. --align 32 also suits K-quants.",
    ),
]
Without = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Pieces of a3+ to leave out, e.g. fold,values: `trisect ls pieces`."),
]
Config = Annotated[Path | None, typer.Option(metavar="FILE", help="YAML or JSON; options typed here win.")]


def build_config(
    path: Path | None, *, run_options: dict[str, Any], calibration_options: dict[str, Any]
) -> "CompressConfig":
    """The file's settings, overridden by what was typed; a goal that was typed replaces the file's."""
    from trisect.config import CompressConfig, read_mapping
    from trisect.goals import GOALS

    data = read_mapping(path) if path is not None else {}
    calibration = data.get("calibration") or {}
    if not isinstance(calibration, dict):
        raise TrisectError(f"calibration in {path} must be a mapping such as {{samples: 128}}.")
    if any(name in run_options for name in GOALS):
        data = {name: value for name, value in data.items() if name not in GOALS}
    merged = {**data, **run_options, "calibration": {**calibration, **calibration_options}}
    config = CompressConfig.from_dict(merged)
    if config.without:
        from trisect.methods.a3plus import check_pieces

        check_pieces(config.without)
    return config
