"""How much each layer changes the hidden states, and which layers a model misses least.          [math.md A-7]"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trisect.calibrate.replay import Progress, Stream, in_batches
from trisect.errors import TrisectError
from trisect.models.looking import training_flags_kept
from trisect.models.view import layer_views


@torch.no_grad()
def layer_influence(
    model: nn.Module,
    ids: Tensor,
    *,
    batch_size: int | None = None,
    place: str = "auto",
    progress: Progress | None = None,
) -> list[float]:
    """1 - E cos(h_in, h_out) of every layer over the tokens of windows (n, t), in one pass."""
    found: list[float] = []
    views = layer_views(model)
    with training_flags_kept(model):
        model.eval()
        stream = Stream.embed(model, views, in_batches(ids, batch_size=batch_size).batches, place=place)
        batches = len(stream.hidden)
        for view in views:
            total = torch.zeros((), dtype=torch.float64, device=stream.hidden[0].device)
            for number, states in enumerate(stream.hidden):
                output = stream.through(view, number, states)
                total += torch.cosine_similarity(states.float(), output.float(), dim=-1).sum(dtype=torch.float64)
                stream.hidden[number] = output
                if progress is not None:
                    progress("influence", view.index * batches + number + 1, len(views) * batches)
            found.append(1 - float(total) / ids.numel())
            if math.isnan(found[-1]):
                raise TrisectError(f"The hidden states after layer {view.index} hold NaN or inf; try --dtype float32.")
    return found


def least_influential(influence: Sequence[float], count: int) -> list[int]:
    """The layers to drop, in order; ties go to the first, and the two ends only where nothing else is left."""
    ends = (0, len(influence) - 1)
    ranked = sorted(range(len(influence)), key=lambda layer: (layer in ends, influence[layer], layer))
    return sorted(ranked[:count])
