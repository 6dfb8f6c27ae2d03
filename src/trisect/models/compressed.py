"""Compressed checkpoints as transformers classes, one per family, made from the stock ones.

`config.trisect` carries the widths. A compressed class builds the stock model, owns its attention modules and
makes every layer as narrow as the config says before weights are loaded.
"""

import sys
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import transformers
from torch import nn

from trisect.errors import TrisectError
from trisect.models.families import FAMILIES, PREFIX, WRAPPERS, Family, family_for
from trisect.models.linear import QuantizedLinear, make_room
from trisect.models.view import layer_views
from trisect.records.shapes import LayerShape, LayerWidths, LinearShape, widths_of

FORMAT, FACTORED_FORMAT, QUANTIZED_FORMAT = 1, 2, 3
"""Versions of the entry: 2 may have factored linear maps and folded rotations, 3 quantised modules as well."""


def check_format(entry: Any) -> None:
    """Refuse what is no entry of trisect, or one of a later version; `limits.check_entry` looks closer."""
    if not isinstance(entry, dict) or not isinstance(entry.get("layers"), list):
        raise TrisectError("config.json has no usable `trisect` entry; the folder was not written by trisect.")
    if entry.get("format") not in (FORMAT, FACTORED_FORMAT, QUANTIZED_FORMAT):
        other = f"config.json has trisect format {str(entry.get('format'))[:40]}, not {FORMAT} to {QUANTIZED_FORMAT}"
        raise TrisectError(f"{other}; install the trisect version that wrote the folder (receipt.json names it).")


class CompressedModel(nn.Module):
    """Mixed in before a stock class, with a language-model head or without."""

    receipt: dict[str, Any] | None = None
    save_pretrained: Any

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.config = config
        family = family_for(config)
        if config.get_text_config()._attn_implementation == "vllm" and (family.experts or family.residual_scale):
            # Its transformers backend would silently compute them wrong; our plugin has another name for it.
            raise TrisectError(f"vLLM runs compressed {family.name} only with trisect's plugin: pip install trisect.")
        _narrow(self, config.trisect)
        make_room(self, config.trisect.get("quantization"))
        if config.model_type == f"{PREFIX}gpt2":
            # The stock class looks for weights of maps that may be packed or factored, to fill them.
            self.is_custom_code = lambda: True  # type: ignore[method-assign]

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: buffers that no file holds are filled as in the stock class."""
        return False


@cache
def compressed_class(name: str) -> type[Any]:
    """The model class for compressed checkpoints of a family; its `config_class` is made with it."""
    record = FAMILIES.get(name) or WRAPPERS[name]
    stock = getattr(transformers, record.model)
    config = _made(stock.config_class, model_type=PREFIX + name)
    return _made(CompressedModel, stock, config_class=config)


@cache
def headless_class(name: str) -> type[Any]:
    """The same without a language-model head, which is what other engines build their models around."""
    config = compressed_class(name).config_class
    return _made(CompressedModel, transformers.MODEL_MAPPING[config.__base__], config_class=config)


def _made(*bases: type[Any], **attributes: Any) -> type[Any]:
    """A class of this module, where pickle looks for it, in an engine's other processes too."""
    name = f"Trisect{bases[-1].__name__}"
    globals()[name] = type(name, bases, {**attributes, "__module__": __name__})
    made: type[Any] = globals()[name]
    return made


def register_families(*names: str) -> None:
    """Teach AutoConfig and AutoModelForCausalLM about compressed checkpoints, of what this transformers has."""
    for name in names or (*FAMILIES, *WRAPPERS):
        if hasattr(transformers, (FAMILIES.get(name) or WRAPPERS[name]).model):
            _register(name)


def register_family(record: Family) -> Family:
    """Add a family from outside the package, for this process; a name that is taken is refused."""
    if record.name in WRAPPERS or FAMILIES.get(record.name, record) != record:
        gone = f"an earlier one of yours is taken out with FAMILIES.pop({record.name!r})"
        raise TrisectError(f"There is a family {record.name!r} already; {gone}.")
    if not hasattr(transformers, record.model):
        raise TrisectError(f"transformers has no {record.model!r}; name its class with a language-model head.")
    FAMILIES[record.name] = record
    _register(record.name)
    return record


def _register(name: str) -> None:
    model = compressed_class(name)
    transformers.AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
    transformers.AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)
    # `transformers serve` looks for what config.json names in the module; its own imports may have made it anew.
    setattr(sys.modules["transformers"], model.__name__, model)
    if model.config_class.__base__ in transformers.MODEL_MAPPING:
        transformers.AutoModel.register(model.config_class, headless_class(name), exist_ok=True)


def mark_compressed(model: Any, *, original: list[LayerWidths], method: str, ratio: float) -> Any:
    """Turn a rewritten stock model into its compressed class, in place, with the widths in its config."""
    shapes = [view.shape() for view in layer_views(model, own=True)]
    _allow_sdpa(model)
    entry = {
        "format": FACTORED_FORMAT if any(shape.linears or shape.folded for shape in shapes) else FORMAT,
        "method": method,
        "ratio": ratio,
        "original": [asdict(widths) for widths in original],
        "layers": [asdict(widths_of(shape)) | _changed(shape) for shape in shapes],
    }
    if dropped := dropped_layers(model):
        entry["dropped_layers"] = dropped
    cls = compressed_class(family_for(model.config).name)
    if not isinstance(model, CompressedModel):
        model.__class__ = cls
        model.config.__class__ = cls.config_class
    # Files get the names that tensors have here: for our classes transformers knows no conversion back.
    model._weight_conversions = []
    model.config.trisect = entry
    model.config.architectures = [cls.__name__]
    return model


def mark_quantized(model: Any, *, backend: str) -> None:
    """Note in a compressed model's config which of its modules are quantised, so that it loads as it is."""
    modules = {path: asdict(m.packing) for path, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    entry = {"format": QUANTIZED_FORMAT, "quantization": {"backend": backend, "modules": modules}}
    model.config.trisect = {**model.config.trisect, **entry}


def original_widths(model: Any) -> list[LayerWidths]:
    """Widths before any compression, from the config; the current ones for a stock model."""
    entry = getattr(model.config, "trisect", None)
    if entry is None:
        return [widths_of(view.shape()) for view in layer_views(model)]
    return [LayerWidths(**widths) for widths in entry["original"]]


def dropped_layers(model: Any) -> list[int]:
    """The layers that the model once had besides, as they were numbered then."""
    known = (getattr(model.config, "trisect", None) or {}).get("dropped_layers", [])
    return list(getattr(model, "dropped_layers", known))


def _changed(shape: LayerShape) -> dict[str, Any]:
    """What a layer became beside narrow; nothing for most."""
    found = {name: getattr(shape, name) for name in ("shared_output", "folded", "dropped_experts")}
    found["linears"] = [asdict(linear) for linear in shape.linears]
    return {name: value for name, value in found.items() if value}


def _allow_sdpa(model: Any) -> None:
    """Let `set_attn_implementation("sdpa")` do so where transformers has no way to sinks through it, but we have."""
    if family_for(model.config).sinks is not None:
        for module in model.modules():
            if isinstance(module, transformers.PreTrainedModel):
                module._supports_sdpa = True


def _narrow(model: nn.Module, entry: Any) -> None:
    """Give every layer the widths that the config says."""
    check_format(entry)
    _allow_sdpa(model)
    views, layers = layer_views(model, own=True), entry["layers"]
    if len(layers) != len(views):
        raise TrisectError(f"config.json plans {len(layers)} layers but the model has {len(views)}.")
    for view, layer in zip(views, layers, strict=True):
        linears = tuple(LinearShape(**linear) for linear in layer.get("linears", ()))
        try:
            view.resize(replace(view.shape(), **{**layer, "linears": linears}))
        except TrisectError as error:
            raise TrisectError(f"config.json does not fit the model: {error}") from error
