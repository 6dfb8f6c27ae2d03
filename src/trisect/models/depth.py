"""Fewer decoder layers: what is left is a smaller dense model, and its config says so."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trisect.errors import TrisectError
from trisect.models.families import family_for
from trisect.models.looking import shape_of
from trisect.models.view import LayerView, layer_views
from trisect.records.shapes import ModelShape
from trisect.support.checks import explained

PLAIN = (bool, int, float, str)  # values by which one layer may differ from another
NUMBER = "layer_idx"  # the attribute with a module's place in the model, and in the KV cache


def parameters_apart(view: LayerView) -> int:
    """Parameters of a layer outside its components: norms, and what is left whole."""
    inside = [p for module in view.projections() for p in module.parameters()]
    return sum(p.numel() for p in view.layer.parameters()) - sum(p.numel() for p in inside)


def shape_without(model: Any, count: int) -> ModelShape:
    """The sizes of a model that has lost `count` layers, whichever; a model that cannot lose them is refused."""
    check_droppable(model, count)
    return shape_of(model).with_depth(len(layer_views(model)) - count, apart=parameters_apart(layer_views(model)[0]))


def check_droppable(model: Any, count: int) -> None:
    """Refuse models whose layers depend on each other, or on their place, and too many layers."""
    views, family = layer_views(model), family_for(model.config)
    reason = None
    if hasattr(model.config, "trisect"):
        reason = "it is compressed already: drop layers of the model it was made from"
    elif family.lends_keys:
        reason = f"{family.name} has layers that read the keys and values of earlier ones"
    elif family.mixer is not None or family.beside is not None:
        reason = f"{family.name} is a hybrid, whose kinds of layers follow a pattern"
    elif len({(view.shape(), parameters_apart(view)) for view in views}) > 1:
        reason = "its layers differ in rotation, experts or widths"
    if reason is not None:
        raise TrisectError(f"--drop-layers cannot drop layers of this model: {reason}; leave it out.")
    if count >= len(views):
        raise TrisectError(f"The model has {len(views)} layers: --drop-layers {len(views) - 1} or less.")
    config_without(model, range(1, count + 1))


def drop_layers(model: Any, dropped: Sequence[int]) -> None:
    """Take layers out of a stock model, in place; those left are numbered anew, in modules and in the config."""
    config, views = config_without(model, dropped), layer_views(model)
    kept = [view.layer for view in views if view.index not in dropped]
    parent, _, name = views[0].family.layers.rpartition(".")
    setattr(model.get_submodule(parent), name, nn.ModuleList(kept))
    for place, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, NUMBER):
                setattr(module, NUMBER, place)
    # Modules hold the model's own config, or the text config inside it: these objects are to stay.
    mine, said = model.config.get_text_config(), config.get_text_config()
    for key in _changes(mine, dropped):
        setattr(mine, key, getattr(said, key))
    model.dropped_layers = sorted(dropped)


def config_without(model: Any, dropped: Sequence[int]) -> Any:
    """A new config of the model without these layers; refused where one built from it would not be what is left."""
    config = _copied(model.config)
    for key, value in _changes(config.get_text_config(), dropped).items():
        setattr(config.get_text_config(), key, value)
    refusal = f"--drop-layers cannot drop layers {', '.join(map(str, dropped))} of this model"
    with torch.device("meta"), explained(refusal):
        config = _copied(config)
        built = layer_views(type(model)(config))
    kept = [view for view in layer_views(model) if view.index not in dropped]
    for old, new in zip(kept, built, strict=True):
        said = {name: _told(module) for name, module in new.layer.named_modules()}
        for name, module in old.layer.named_modules():
            told = said.get(name)
            differs = [key for key, value in _told(module).items() if told is None or told.get(key, value) != value]
            if differs:
                where = ".".join(filter(None, (name, differs[0])))
                raise TrisectError(f"{refusal}: its config ties {where} of a layer to its number; leave it out.")
    return config


def _copied(config: Any) -> Any:
    """The config as it is read back from a file."""
    return type(config).from_dict(config.to_dict())


def _changes(text: Any, dropped: Sequence[int]) -> dict[str, Any]:
    """What a config says otherwise without these layers: how many there are, and lists with an entry for each."""
    count = text.num_hidden_layers
    lists = {key: value for key, value in text.to_dict().items() if isinstance(value, list | tuple) and "layer" in key}
    found = {
        key: [entry for number, entry in enumerate(value) if number not in dropped]
        for key, value in lists.items()
        if len(value) == count
    }
    return {"num_hidden_layers": count - len(dropped), **found}


def _told(module: nn.Module) -> dict[str, Any]:
    """What a module was told when it was made, but for its place; not its class, which work on it may change."""
    told = {key: value for key, value in vars(module).items() if isinstance(value, PLAIN) or value is None}
    return {key: value for key, value in told.items() if key not in ("training", NUMBER) and not key.startswith("_")}
