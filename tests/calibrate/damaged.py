"""Both streams of a tiny model whose narrow one has lost something, and a metric of its outputs."""

from collections.abc import Callable

import torch
from torch import Tensor

from tiny_models import tiny, tokens
from trisect.calibrate import TwoStreams
from trisect.models import layer_views
from trisect.models.view import LayerView


def damaged_streams(
    name: str, wanted: Callable[[LayerView], bool], *, batch_size: int | None = None
) -> tuple[TwoStreams, LayerView]:
    """Both streams in front of the last layer that is wanted, or the last, the ones before with less of their MLPs."""
    model, ids = tiny(name).double(), tokens(8, 12)
    model.config._experts_implementation = "eager"  # grouped products know no float64
    views = layer_views(model, own=True)
    streams = TwoStreams(model, views, ids, batch_size=batch_size, seed=0)
    last = max((view.index for view in views if wanted(view)), default=len(views) - 1)
    for view in views[:last]:
        streams.begin(view)
        output = view.mlp_output
        assert output is not None
        handle = output.register_forward_hook(
            lambda module, args, out: (out[0] * 0.7, *out[1:]) if isinstance(out, tuple) else out * 0.7
        )
        streams.finish(view)
        handle.remove()
    streams.begin(views[last])
    return streams, views[last]


def a_metric(size: int) -> Tensor:
    """A triangle (D, D) with a positive diagonal."""
    noise = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return (0.2 * noise).tril(-1) + torch.diag(0.5 + noise.diagonal().abs())
