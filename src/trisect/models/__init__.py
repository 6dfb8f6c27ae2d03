"""Models: family records, views of layers, the owned attention, compressed classes, checkpoints."""

from typing import TYPE_CHECKING

from trisect.support import lazily

if TYPE_CHECKING:
    from trisect.models.checkpoint import Loaded, load_model, original_shape, read_shape, save_model
    from trisect.models.compressed import mark_compressed, original_widths, register_family
    from trisect.models.families import FAMILIES, WRAPPERS, Family, family_for
    from trisect.models.looking import fingerprint, round_as_stored, shape_of, zeros_of
    from trisect.models.view import LayerView, layer_views, left_whole

__getattr__ = lazily(
    __name__,
    {
        "checkpoint": "Loaded load_model original_shape read_shape save_model",
        "compressed": "mark_compressed original_widths register_family",
        "families": "FAMILIES WRAPPERS Family family_for",
        "looking": "fingerprint round_as_stored shape_of zeros_of",
        "view": "LayerView layer_views left_whole",
    },
)
