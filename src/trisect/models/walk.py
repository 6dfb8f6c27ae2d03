"""The layers of a model one after the other, whether all are in memory or each comes and goes."""

from collections.abc import Iterator
from typing import Any

from trisect.errors import TrisectError
from trisect.models.view import LayerView, layer_views


def refuse_streamed(model: Any, what: str) -> None:
    """Some work has all layers in memory at a time."""
    if hasattr(model, "layer_store"):
        raise TrisectError(f"{what} needs the whole model in memory; use --stream off.")


def walk(model: Any) -> Iterator[LayerView]:
    """Each layer, in memory until the caller asks for the next one."""
    store = getattr(model, "layer_store", None)
    for view in layer_views(model):
        if store is None:
            yield view
        else:
            with store.present(view.index):
                yield view
