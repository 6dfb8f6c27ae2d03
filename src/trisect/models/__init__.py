"""Models: family records, views of layers, the owned attention, compressed classes, checkpoints."""

from typing import Any

from trisect.models.checkpoint import Loaded, load_model, original_shape, read_shape, save_model
from trisect.models.compressed import mark_compressed, original_widths, register_families, register_family
from trisect.models.families import FAMILIES, WRAPPERS, Family, family_for
from trisect.models.fingerprint import fingerprint, round_as_stored, shape_of, zeros_of
from trisect.models.view import LayerView, layer_views, left_whole


def family_of(model: Any) -> Family:
    """The family record of a loaded model."""
    return family_for(model.config)


__all__ = [
    "FAMILIES",
    "WRAPPERS",
    "Family",
    "LayerView",
    "Loaded",
    "family_for",
    "family_of",
    "fingerprint",
    "layer_views",
    "left_whole",
    "load_model",
    "mark_compressed",
    "original_shape",
    "original_widths",
    "read_shape",
    "register_families",
    "register_family",
    "round_as_stored",
    "save_model",
    "shape_of",
    "zeros_of",
]
