"""The norm in front of the head, scaled so that the head reads what comes closest to the dense model's."""

from typing import Any

import torch
from torch import nn

from trisect.calibrate.streams import TwoStreams
from trisect.models.families import Family
from trisect.workers import summed


@torch.no_grad()
def scale_last_norm(model: nn.Module, streams: TwoStreams) -> float:
    """Multiply the last norm with E<x, y> / E|x|^2, both streams being behind the last layer.   [math.md F-4]

    What the narrow model gets wrong lies on its hidden states like noise, and least squares shrinks noise.
    """
    norm = last_norm(model, streams.views[0].family)
    if norm is None:
        return 1.0
    device = next(norm.parameters()).device
    sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in ("cross", "energy")}
    for dense, narrow in zip(streams.dense.hidden, streams.narrow.hidden, strict=True):
        x, y = norm(narrow).double(), norm(dense).double()
        sums["cross"] += (x * y).sum()
        sums["energy"] += x.square().sum()
    if streams.windows.shared:
        sums = summed(sums)
    energy = sums["energy"].item()
    factor = sums["cross"].item() / energy if energy > 0 else 1.0
    for parameter in norm.parameters():
        parameter.data = parameter.data * factor
    return factor


def last_norm(model: nn.Module, family: Family) -> Any:
    """The norm between the last layer and the head; None where the architecture has none."""
    decoder = model.get_submodule(family.layers.rpartition(".")[0])
    return getattr(decoder, family.last_norm, None)
