"""Compile decoder layers one by one: equal layers share one compilation."""

from collections.abc import Sequence
from typing import Any

import torch

from trisect.models import LayerView


def compile_layers(views: Sequence[LayerView], **options: Any) -> None:
    """Compile every layer's forward in place; `options` go to torch.compile.

    Layers must not differ in anything the compiler looks at but their sizes: attention writes through its own
    `live` cache layer, not through an index into a list.
    """
    # Each set of widths is a compilation of its own, and torch gives up after a few.
    shapes = {view.shape() for view in views}
    limit = 2 * len(shapes) + 8
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    for view in views:
        view.layer.compile(**options)
