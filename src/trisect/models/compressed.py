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
from trisect.models.families import FAMILIES, PREFIX, WRAPPERS, family_for
from trisect.models.view import layer_views
from trisect.shapes import LayerWidths, widths_of

FORMAT = 1
"""Version of the `trisect` entry in config.json; readers refuse newer ones."""


class CompressedModel(nn.Module):
    """Mixed in before a stock class with a language-model head."""

    receipt: dict[str, Any] | None = None
    save_pretrained: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.config = config
        _narrow(self, config.trisect)


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
        model = compressed_class(name)
        transformers.AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
        transformers.AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)


def mark_compressed(model: Any, *, original: list[LayerWidths], method: str, ratio: float) -> Any:
    """Turn a rewritten stock model into its compressed class, in place, with the widths in its config."""
    entry = {
        "format": FORMAT,
        "method": method,
        "ratio": ratio,
        "original": [asdict(widths) for widths in original],
        "layers": [_layer_entry(view.shape()) for view in layer_views(model)],
    }
    cls = compressed_class(family_for(model.config).name)
    if not isinstance(model, CompressedModel):
        model.__class__ = cls
        model.config.__class__ = cls.config_class
    model.config.trisect = entry
    model.config.architectures = [cls.__name__]
    return model


def original_widths(model: Any) -> list[LayerWidths]:
    """Widths before any compression, from the config; the current ones for a stock model."""
    entry = getattr(model.config, "trisect", None)
    if entry is None:
        return [widths_of(view.shape()) for view in layer_views(model)]
    return [LayerWidths(**widths) for widths in entry["original"]]


def _layer_entry(shape: Any) -> dict[str, Any]:
    entry: dict[str, Any] = asdict(widths_of(shape))
    return {**entry, "shared_output": True} if shape.shared_output else entry


def _narrow(model: nn.Module, entry: Any) -> None:
    views = layer_views(model)
    for view, wanted in zip(views, _checked(entry, len(views)), strict=True):
        view.resize(replace(view.shape(), **wanted))


def _checked(entry: Any, num_layers: int) -> list[dict[str, Any]]:
    """The per-layer entries of a config, or an error that says what is wrong with it."""
    if not isinstance(entry, dict) or not isinstance(entry.get("layers"), list):
        raise TrisectError(
            "config.json has no usable `trisect` entry; the folder was not written by trisect."
        )
    if entry.get("format") != FORMAT:
        raise TrisectError(
            f"config.json has trisect format {entry.get('format')!r}, this version reads {FORMAT}; "
            "install the trisect version that wrote the folder (receipt.json names it)."
        )
    layers = entry["layers"]
    if len(layers) != num_layers:
        raise TrisectError(f"config.json plans {len(layers)} layers but the model has {num_layers}.")
    keys = {"qk", "pairs", "vo", "mlp"}
    for index, layer in enumerate(layers):
        if not isinstance(layer, dict) or not keys <= set(layer) <= keys | {"shared_output"}:
            raise TrisectError(f"config.json: layer {index} of the plan needs {sorted(keys)}, got {layer!r}.")
        if not all(isinstance(layer[key], int) and layer[key] >= 0 for key in keys):
            raise TrisectError(
                f"config.json: layer {index} of the plan has a width that is not a count: {layer!r}."
            )
        if not (layer["qk"] and layer["vo"] and layer["mlp"] and 2 * layer["pairs"] <= layer["qk"]):
            raise TrisectError(f"config.json: layer {index} of the plan has impossible widths: {layer!r}.")
    return layers
