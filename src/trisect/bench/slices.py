"""A few layers in place of all of them: what the rest would add."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from trisect.errors import TrisectError
from trisect.models import family_for
from trisect.plan.budget import bias_parameters, matrix_parameters
from trisect.records.parts import COMPONENTS
from trisect.records.shapes import ModelShape


@contextmanager
def first_layers(model: Any, count: int) -> Iterator[None]:
    """Inside, the model has its first `count` decoder layers only."""
    path = family_for(model.config).layers
    whole, text = model.get_submodule(path), model.config.get_text_config()
    number = text.num_hidden_layers
    model.set_submodule(path, nn.ModuleList(list(whole)[:count]))
    text.num_hidden_layers = count
    try:
        yield
    finally:
        model.set_submodule(path, whole)
        text.num_hidden_layers = number


def whole_from(many: float, one: float, *, measured: int, layers: int) -> float:
    """Time of all layers from those of `measured` layers and of one: every further layer costs the same."""
    if many <= one:
        raise TrisectError(
            f"{measured} layers were not slower than one ({many:.3g} s and {one:.3g} s), so nothing follows "
            "for all of them: use more --layers or --repeats, or a quieter machine."
        )
    return many + (layers - measured) * (many - one) / (measured - 1)


def missing_bytes(model: Any, shape: ModelShape, *, measured: int) -> int:
    """Parameters of the layers that a slice leaves out; their norms are those of the first layer."""
    path = family_for(model.config).layers
    first = next(iter(model.get_submodule(path).children()))
    bytes_of_first = sum(p.nbytes for p in first.parameters())
    sizes = [_linear_bytes(shape, index) for index in range(len(shape.layers))]
    rest = bytes_of_first - sizes[0]
    return sum(size + rest for size in sizes[measured:])


def _linear_bytes(shape: ModelShape, index: int) -> int:
    layer = shape.layers[index]
    matrices = sum(matrix_parameters(layer, part) for part in COMPONENTS)
    return (matrices + bias_parameters(layer)) * shape.bytes_per_element
