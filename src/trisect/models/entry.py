"""The `trisect` entry of a config.json, which anybody may have written: checked before it is used."""

from typing import Any

from trisect.errors import TrisectError
from trisect.parts import INPUTS
from trisect.untrusted import shown

FORMAT = 1
FACTORED_FORMAT = 2
QUANTIZED_FORMAT = 3
"""Versions of the entry: 2 may have factored linear maps and folded rotations, 3 quantised modules as well.

Readers refuse newer ones.
"""

WIDTHS = {"qk", "pairs", "vo", "mlp"}
FACTORS = {"name", "rank", "groups", "cached"}
WIDEST = 1 << 24
"""No width or rank is this large; whether it fits the weights is checked with them."""


def checked_layers(entry: Any, num_layers: int) -> list[dict[str, Any]]:
    """The per-layer entries of a config, or an error that says what is wrong with it."""
    if not isinstance(entry, dict) or not isinstance(entry.get("layers"), list):
        raise TrisectError(
            "config.json has no usable `trisect` entry; the folder was not written by trisect."
        )
    version = entry.get("format")
    if version not in (FORMAT, FACTORED_FORMAT, QUANTIZED_FORMAT):
        raise TrisectError(
            f"config.json has trisect format {shown(version)}, this version reads {FORMAT} to "
            f"{QUANTIZED_FORMAT}; install the trisect version that wrote the folder (receipt.json names it)."
        )
    layers = entry["layers"]
    if len(layers) != num_layers:
        raise TrisectError(f"config.json plans {len(layers)} layers but the model has {num_layers}.")
    _check_origin(entry, num_layers)
    extra = {"shared_output"} if version == FORMAT else {"shared_output", "linears", "folded"}
    for index, layer in enumerate(layers):
        if not isinstance(layer, dict) or not WIDTHS <= set(layer) <= WIDTHS | extra:
            raise TrisectError(
                f"config.json: layer {index} of the plan needs {sorted(WIDTHS)}, got {shown(layer)}."
            )
        _check_widths(index, layer)
        _check_linears(index, layer.get("linears", []))
    return layers


def _check_origin(entry: dict[str, Any], num_layers: int) -> None:
    """What the model was before, and what was done to it: shown to people, and compared with."""
    original: Any = entry.get("original")
    whole = isinstance(original, list) and len(original) == num_layers
    if not whole or not all(
        isinstance(widths, dict) and set(widths) == WIDTHS and all(map(_is_width, widths.values()))
        for widths in original
    ):
        raise TrisectError(
            f"config.json: the original widths of {num_layers} layers are needed, got {shown(original)}."
        )
    method: Any = entry.get("method")
    ratio: Any = entry.get("ratio")
    if not isinstance(method, str) or not method.isprintable() or len(method) > 100:
        raise TrisectError(f"config.json: the method of the plan must be a name, not {shown(method)}.")
    if type(ratio) not in (int, float) or not 0 <= ratio <= 1:
        raise TrisectError(f"config.json: the ratio of the plan must be from 0 to 1, not {shown(ratio)}.")


def _check_widths(index: int, layer: dict[str, Any]) -> None:
    if not all(_is_width(layer[key]) for key in WIDTHS):
        raise TrisectError(
            f"config.json: layer {index} of the plan has a width that is not a count: {shown(layer)}."
        )
    if not all(isinstance(layer.get(key, True), bool) for key in ("shared_output", "folded")):
        raise TrisectError(
            f"config.json: layer {index} of the plan has a flag that is not true or false: {shown(layer)}."
        )
    if not (layer["qk"] and layer["vo"] and layer["mlp"] and 2 * layer["pairs"] <= layer["qk"]):
        raise TrisectError(f"config.json: layer {index} of the plan has impossible widths: {shown(layer)}.")


def _check_linears(index: int, linears: Any) -> None:
    """Types and names; whether a rank fits its map is known once the layer has its widths."""
    if not isinstance(linears, list):
        raise TrisectError(
            f"config.json: the factored maps of layer {index} must be a list, got {shown(linears)}."
        )
    for linear in linears:
        if not isinstance(linear, dict) or set(linear) != FACTORS or not _counted(linear):
            raise TrisectError(
                f"config.json: a factored map of layer {index} needs a name of {', '.join(INPUTS)}, rank and "
                f"groups of 1 or more, and cached true or false; got {shown(linear)}."
            )
    names = [linear["name"] for linear in linears]
    if len(set(names)) != len(names):
        raise TrisectError(f"config.json: layer {index} factors a map twice: {', '.join(names)}.")


def _counted(linear: dict[str, Any]) -> bool:
    counts = [linear["rank"], linear["groups"]]
    named = isinstance(linear["name"], str) and linear["name"] in INPUTS
    return named and isinstance(linear["cached"], bool) and all(_is_width(n) and n > 0 for n in counts)


def _is_width(value: Any) -> bool:
    return type(value) is int and 0 <= value <= WIDEST
