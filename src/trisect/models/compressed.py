"""Compressed checkpoints as transformers classes, one per family, made from the stock ones.

`config.trisect` carries the widths. A compressed class builds the stock model, owns its attention modules and
makes every layer as narrow as the config says before weights are loaded.
"""

from dataclasses import asdict, replace
from functools import cache
from typing import Any

import transformers
from torch import nn

from trisect.errors import TrisectError
from trisect.models.families import FAMILIES, PREFIX, WRAPPERS, Family, family_for
from trisect.models.quantized import make_room, packing_entry
from trisect.models.view import layer_views
from trisect.records.parts import INPUTS
from trisect.records.shapes import LayerShape, LayerWidths, LinearShape, widths_of
from trisect.support.checks import shown

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


class CompressedModel(nn.Module):
    """Mixed in before a stock class with a language-model head."""

    receipt: dict[str, Any] | None = None
    save_pretrained: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.config = config
        _narrow(self, config.trisect)
        make_room(self, config.trisect.get("quantization"))


@cache
def compressed_class(name: str) -> type[Any]:
    """The model class for compressed checkpoints of a family; its `config_class` is made with it."""
    record = FAMILIES.get(name) or WRAPPERS[name]
    stock = getattr(transformers, record.model)
    stock_config = stock.config_class
    config = type(
        f"Trisect{stock_config.__name__}",
        (stock_config,),
        {"model_type": PREFIX + name, "__module__": __name__},
    )
    return type(
        f"Trisect{stock.__name__}",
        (CompressedModel, stock),
        {"config_class": config, "__module__": __name__},
    )


def register() -> None:
    """Teach AutoConfig and AutoModelForCausalLM about compressed checkpoints."""
    for name in (*FAMILIES, *WRAPPERS):
        _register(name)


def register_family(record: Family) -> Family:
    """Add a family from outside the package, for this process; a name that is taken is refused."""
    if record.name in WRAPPERS or FAMILIES.get(record.name, record) != record:
        raise TrisectError(
            f"There is a family {record.name!r} already; an earlier one of yours is taken out with "
            f"FAMILIES.pop({record.name!r})."
        )
    if not hasattr(transformers, record.model):
        raise TrisectError(
            f"transformers has no {record.model!r}; name its class with a language-model head."
        )
    FAMILIES[record.name] = record
    _register(record.name)
    return record


def _register(name: str) -> None:
    model = compressed_class(name)
    transformers.AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
    transformers.AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)


def mark_compressed(model: Any, *, original: list[LayerWidths], method: str, ratio: float) -> Any:
    """Turn a rewritten stock model into its compressed class, in place, with the widths in its config."""
    shapes = [view.shape() for view in layer_views(model)]
    entry = {
        "format": FACTORED_FORMAT if any(shape.linears or shape.folded for shape in shapes) else FORMAT,
        "method": method,
        "ratio": ratio,
        "original": [asdict(widths) for widths in original],
        "layers": [_layer_entry(shape) for shape in shapes],
    }
    cls = compressed_class(family_for(model.config).name)
    if not isinstance(model, CompressedModel):
        model.__class__ = cls
        model.config.__class__ = cls.config_class
    model.config.trisect = entry
    model.config.architectures = [cls.__name__]
    return model


def mark_quantized(model: Any, *, backend: str) -> None:
    """Note in a compressed model's config which of its modules are quantised, so that it loads as it is."""
    entry = {"format": QUANTIZED_FORMAT, "quantization": packing_entry(model, backend=backend)}
    model.config.trisect = {**model.config.trisect, **entry}


def original_widths(model: Any) -> list[LayerWidths]:
    """Widths before any compression, from the config; the current ones for a stock model."""
    entry = getattr(model.config, "trisect", None)
    if entry is None:
        return [widths_of(view.shape()) for view in layer_views(model)]
    return [LayerWidths(**widths) for widths in entry["original"]]


def _layer_entry(shape: LayerShape) -> dict[str, Any]:
    entry: dict[str, Any] = asdict(widths_of(shape))
    if shape.shared_output:
        entry["shared_output"] = True
    if shape.folded:
        entry["folded"] = True
    if shape.linears:
        entry["linears"] = [asdict(linear) for linear in shape.linears]
    return entry


def _narrow(model: nn.Module, entry: Any) -> None:
    views = layer_views(model)
    for view, layer in zip(views, checked_layers(entry, len(views)), strict=True):
        linears = tuple(LinearShape(**linear) for linear in layer.get("linears", ()))
        try:
            view.resize(replace(view.shape(), **{**layer, "linears": linears}))
        except TrisectError as error:
            raise TrisectError(f"config.json does not fit the model: {error}") from error
