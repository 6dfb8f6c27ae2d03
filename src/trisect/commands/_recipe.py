"""What `compress` and `plan` share: the options that make a configuration."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trisect.commands._names import allocation_names, completed, method_names, one_of, piece_names
from trisect.commands._options import given

if TYPE_CHECKING:
    from trisect.config import CompressConfig

GOAL, CUT = "Goal", "How to cut"

Ratio = Annotated[
    float | None,
    typer.Option(help="Fraction of the decoder's weights to remove, e.g. 0.25.", rich_help_panel=GOAL),
]
KvRatio = Annotated[
    float | None,
    typer.Option(
        help="Instead: fraction of the KV cache to remove, from attention alone.", rich_help_panel=GOAL
    ),
]
TargetParams = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Instead: parameters of the whole model, e.g. 100M or 1.2B.",
        rich_help_panel=GOAL,
    ),
]
TargetKvBytes = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Instead: KV cache bytes per token, e.g. 20K (20,000) or 20KiB (20,480).",
        rich_help_panel=GOAL,
    ),
]
MaxPplIncrease = Annotated[
    str | None,
    typer.Option(
        metavar="5%|1.5",
        help="Instead: the smallest model whose perplexity on held-out calibration windows rises by no more.",
        rich_help_panel=GOAL,
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="params|kv|flops|latency",
        help="What --ratio is a fraction of. (default: params)",
        autocompletion=one_of("params", "kv", "flops", "latency"),
        rich_help_panel=GOAL,
    ),
]
LatencyTable = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Measured times, for --budget latency.", rich_help_panel=GOAL),
]
Floor = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE|PART=SHARE,...",
        help="Of its width that nothing goes below: 0.25, or qk=0.5,mlp=0.3.",
        rich_help_panel=GOAL,
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="See `trisect ls methods`. (default: a3+)",
        autocompletion=completed(method_names),
        rich_help_panel=CUT,
    ),
]
Parts = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="What to narrow. (default: qk,ov,mlp)", rich_help_panel=CUT),
]
Layers = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="E.g. 4-27 or 0,3,5-7. (default: all)", rich_help_panel=CUT),
]
Align = Annotated[
    str | None,
    typer.Option(
        metavar="32|16|8|none",
        help="Head widths in multiples; none = exact. (default: 16)",
        autocompletion=one_of("32", "16", "8", "none"),
        rich_help_panel=CUT,
    ),
]
Allocate = Annotated[
    str | None,
    typer.Option(
        metavar="uniform|search|balanced",
        help="Widths: the same share off each; by loss curves per layer; or per layer and part. "
        "(default: as the method has it)",
        autocompletion=completed(allocation_names),
        rich_help_panel=CUT,
    ),
]
Curves = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Loss curves for search and balanced: read, or measured and written.",
        rich_help_panel=CUT,
    ),
]
RopeScope = Annotated[
    str | None,
    typer.Option(
        metavar="head|layer|model",
        help="Who shares one set of RoPE frequencies, in a3+. (default: head)",
        autocompletion=one_of("head", "layer", "model"),
        rich_help_panel=CUT,
    ),
]
Portable = Annotated[
    bool | None,
    typer.Option(
        "--portable",
        help="For `trisect export` without padding: --rope-scope model, one head width that kernels know "
        "(multiples of 16 from half the old width on), one MLP width. --align 32 also suits K-quants.",
        rich_help_panel=CUT,
    ),
]
Without = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Pieces of a3+ to leave out, e.g. fold,values: `trisect ls pieces`.",
        autocompletion=completed(piece_names),
        rich_help_panel=CUT,
    ),
]
QkNormTolerance = Annotated[
    float | None,
    typer.Option(
        help="Models with QK-norm: how far a narrow layer's norm may be off before its QK stays whole. "
        "(default: 0.1)",
        rich_help_panel=CUT,
    ),
]


def build_config(options: Mapping[str, Any]) -> "CompressConfig":
    """The configuration that a verb's options come to; those that are no part of it are passed over.

    They have the names of the settings, but for the text to calibrate on, which is its record's `source`.
    """
    from trisect.config import CalibrationConfig, CompressConfig

    calibration = {**options, "source": options["calibration"] or None}
    run = {**options, "calibration": _of_record(CalibrationConfig, calibration)}
    config = CompressConfig.from_dict(_of_record(CompressConfig, run))
    if config.without:
        from trisect.methods.a3plus import check_pieces

        check_pieces(config.without)
    return config


def _of_record(record: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given and are fields of a record."""
    names = {entry.name for entry in fields(record)}
    return given(**{name: value for name, value in options.items() if name in names})
