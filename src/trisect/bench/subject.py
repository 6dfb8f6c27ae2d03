"""What is put on the bench: a stock architecture, and for a compressed checkpoint its layers."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from trisect.bench.shapes import published
from trisect.errors import TrisectError
from trisect.models import family_for, layer_views, shape_of
from trisect.models.compressed import compressed_class
from trisect.models.families import FAMILIES, PREFIX
from trisect.records.shapes import LayerShape, ModelShape

LAYER_COUNTS = ("num_hidden_layers", "n_layers", "n_layer")
"""What configs call their number of layers."""
FORGOTTEN = ("trisect", "model_type", "architectures", "quantization_config", "transformers_version")
"""What a compressed checkpoint's config has and its original's must not inherit."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An architecture to be built with random weights."""

    name: str
    config: Any
    """The stock transformers config of the dense model."""
    narrowed: tuple[LayerShape, ...] | None = None
    """Layers of a compressed checkpoint; None for a stock one."""

    @property
    def num_layers(self) -> int:
        return int(getattr(self.config.get_text_config(), "num_hidden_layers", 0))

    def dense_shape(self, dtype: torch.dtype) -> ModelShape:
        """Sizes of the dense model, from its config alone."""
        shape = shape_of(stock_model(self.config, dtype=dtype, device="meta"))
        return replace(shape, bytes_per_element=dtype.itemsize)

    def sliced(self, layers: int | None) -> "Subject":
        """The same model with its first layers only."""
        if layers is None:
            return self
        if not 2 <= layers <= self.num_layers:
            raise TrisectError(
                f"--layers must be from 2 to {self.num_layers}, the layers of {self.name}, not {layers}."
            )
        narrowed = None if self.narrowed is None else self.narrowed[:layers]
        return replace(self, config=with_layers(self.config, layers), narrowed=narrowed)


def subject_of_shape(name: str) -> Subject:
    """A published shape."""
    return Subject(name=name, config=published(name).build())


def subject_of_model(name: str, *, trust_remote_code: bool = False) -> Subject:
    """A hub id, folder, GGUF file or built-in name: its config is read, its weights are not."""
    from trisect.models.checkpoint import fetched, read_config
    from trisect.models.source import resolve

    config = read_config(resolve(fetched(name)), trust_remote_code=trust_remote_code)
    if family_for(config).name not in FAMILIES:
        raise TrisectError(
            f"{name} is a {config.model_type} model, of which only the text part could be timed; "
            f"bench its text model, or a shape: trisect bench --shape NAME."
        )
    if not config.model_type.startswith(PREFIX):
        return Subject(name=name, config=config)
    with torch.device("meta"):
        model = compressed_class(family_for(config).name)(config)
    layers = tuple(view.shape() for view in layer_views(model))
    return Subject(name=name, config=original_config(config), narrowed=layers)


def original_config(config: Any) -> Any:
    """The stock config that a compressed one was made from."""
    stock = getattr(transformers, family_for(config).model).config_class
    settings = {name: value for name, value in config.to_dict().items() if name not in FORGOTTEN}
    return stock.from_dict(settings)


def stock_model(config: Any, *, dtype: torch.dtype, device: str, attention: str | None = None) -> Any:
    """The stock class for a config, built on a device (meta: sizes only).

    Its config is a copy: models write into theirs, and a compressed one changes its class.
    """
    stock = getattr(transformers, family_for(config).model)
    wanted = {} if attention is None else {"attn_implementation": attention}
    with torch.device(device):
        return stock._from_config(copy.deepcopy(config), dtype=dtype, **wanted)


def with_layers(config: Any, layers: int) -> Any:
    """A copy of a config with fewer layers."""
    settings = config.to_dict()
    name = next(name for name in LAYER_COUNTS if name in settings)
    if isinstance(settings.get("layer_types"), list):
        settings["layer_types"] = settings["layer_types"][:layers]
    return type(config).from_dict({**settings, name: layers})
