"""Sensitivities of single linear maps in a file: measured once, for any ratio."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.files import write_json
from trisect.plan.ranks import Curve, Key
from trisect.untrusted import read_json, shown

ROW = ("layer", "map", "share", "perplexity")


def write_sensitivities(path: str | Path, curves: Mapping[Key, Curve], made_of: Mapping[str, str]) -> None:
    """One row per map and share, and what they were measured on."""
    rows = [
        dict(zip(ROW, (*key, share, perplexity), strict=True))
        for key, curve in curves.items()
        for share, perplexity in curve.items()
    ]
    write_json(path, {**made_of, "sensitivities": rows})


def read_sensitivities(
    path: str | Path, made_of: Mapping[str, str], needed: Iterable[Key]
) -> dict[Key, dict[float, float]]:
    """What the file has of the maps needed; refused if it was measured on anything else."""
    data = read_json(path)
    rows = data.get("sensitivities") if isinstance(data, dict) else None
    if not isinstance(rows, list):
        raise TrisectError(f"Cannot read sensitivities from {path}: there is no list of them in it.")
    for name, value in made_of.items():
        if data.get(name) != value:
            raise TrisectError(
                f"The sensitivities in {path} are of another {name.replace('_', ' ')}: "
                f"{shown(data.get(name))}, not {value}; name a new file with --curves."
            )
    curves: dict[Key, dict[float, float]] = {}
    for number, row in enumerate(rows):
        layer, name, share, perplexity = _checked(row, where=f"{path}, row {number}")
        curves.setdefault((layer, name), {})[share] = perplexity
    for key in needed:
        if key not in curves:
            raise TrisectError(f"{path} has no sensitivities of {key[1]} in layer {key[0]}; name a new file.")
    return {key: curves[key] for key in needed}


def _checked(row: Any, *, where: str) -> tuple[int, str, float, float]:
    values: list[Any] = [row.get(name) for name in ROW] if isinstance(row, dict) else [None] * len(ROW)
    layer, name, share, perplexity = values
    numbers = all(type(value) in (int, float) for value in (share, perplexity))
    if type(layer) is not int or not isinstance(name, str) or not numbers or not 0 < share < 1:
        raise TrisectError(f"{where}: rows have {', '.join(ROW)}, not {shown(row)}.")
    return layer, name, float(share), float(perplexity)
