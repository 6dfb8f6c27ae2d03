"""The `trisect` entry of a config.json, which anybody may have written: checked before it is used."""

from typing import Any

from trisect.errors import TrisectError
from trisect.parts import INPUTS

FORMAT = 1
FACTORED_FORMAT = 2
"""Versions of the entry: only 2 has factored linear maps and folded rotations. Readers refuse newer ones."""

WIDTHS = {"qk", "pairs", "vo", "mlp"}
FACTORS = {"name", "rank", "groups", "cached"}


def checked_layers(entry: Any, num_layers: int) -> list[dict[str, Any]]:
    """The per-layer entries of a config, or an error that says what is wrong with it."""
    if not isinstance(entry, dict) or not isinstance(entry.get("layers"), list):
        raise TrisectError(
            "config.json has no usable `trisect` entry; the folder was not written by trisect."
        )
    version = entry.get("format")
    if version not in (FORMAT, FACTORED_FORMAT):
        raise TrisectError(
            f"config.json has trisect format {version!r}, this version reads {FORMAT} and {FACTORED_FORMAT}; "
            "install the trisect version that wrote the folder (receipt.json names it)."
        )
    layers = entry["layers"]
    if len(layers) != num_layers:
        raise TrisectError(f"config.json plans {len(layers)} layers but the model has {num_layers}.")
    extra = {"shared_output", "linears", "folded"} if version == FACTORED_FORMAT else {"shared_output"}
    for index, layer in enumerate(layers):
        if not isinstance(layer, dict) or not WIDTHS <= set(layer) <= WIDTHS | extra:
            raise TrisectError(
                f"config.json: layer {index} of the plan needs {sorted(WIDTHS)}, got {layer!r}."
            )
        _check_widths(index, layer)
        _check_linears(index, layer.get("linears", []))
    return layers


def _check_widths(index: int, layer: dict[str, Any]) -> None:
    if not all(isinstance(layer[key], int) and layer[key] >= 0 for key in WIDTHS):
        raise TrisectError(
            f"config.json: layer {index} of the plan has a width that is not a count: {layer!r}."
        )
    if not all(isinstance(layer.get(key, True), bool) for key in ("shared_output", "folded")):
        raise TrisectError(
            f"config.json: layer {index} of the plan has a flag that is not true or false: {layer!r}."
        )
    if not (layer["qk"] and layer["vo"] and layer["mlp"] and 2 * layer["pairs"] <= layer["qk"]):
        raise TrisectError(f"config.json: layer {index} of the plan has impossible widths: {layer!r}.")


def _check_linears(index: int, linears: Any) -> None:
    """Types and names; whether a rank fits its map is known once the layer has its widths."""
    if not isinstance(linears, list):
        raise TrisectError(
            f"config.json: the factored maps of layer {index} must be a list, got {linears!r}."
        )
    for linear in linears:
        if not isinstance(linear, dict) or set(linear) != FACTORS or not _counted(linear):
            raise TrisectError(
                f"config.json: a factored map of layer {index} needs a name of {', '.join(INPUTS)}, rank and "
                f"groups of 1 or more, and cached true or false; got {linear!r}."
            )
    names = [linear["name"] for linear in linears]
    if len(set(names)) != len(names):
        raise TrisectError(f"config.json: layer {index} factors a map twice: {', '.join(names)}.")


def _counted(linear: dict[str, Any]) -> bool:
    counts = [linear["rank"], linear["groups"]]
    named = isinstance(linear["name"], str) and linear["name"] in INPUTS
    return named and isinstance(linear["cached"], bool) and all(type(n) is int and n > 0 for n in counts)
