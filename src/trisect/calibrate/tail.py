"""The norm in front of the head, scaled so that the head reads what comes closest to the dense model's."""

import torch
from torch import nn

from trisect.calibrate.streams import TwoStreams
from trisect.errors import unknown_name
from trisect.models.families import Family
from trisect.workers import summed


@torch.no_grad()
def scale_last_norm(norm: nn.Module | None, streams: TwoStreams) -> float:
    """Multiply the last norm with E<x, y> / E|x|^2, both streams being behind the last layer.   [math.md F-4]

    What the narrow model gets wrong lies on its hidden states like noise, and least squares shrinks noise.
    """
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


def last_norm(model: nn.Module, family: Family) -> nn.Module | None:
    """The norm between the last layer and the head; None in a model that goes without."""
    decoder = model.get_submodule(family.layers.rpartition(".")[0])
    if not hasattr(decoder, family.last_norm):
        near = [name for name, _ in decoder.named_children()]
        raise unknown_name(
            f"last norm of family {family.name}",
            family.last_norm,
            near,
            "Give the family its last_norm=..., or add --without tail.",
        )
    norm: nn.Module | None = getattr(decoder, family.last_norm)
    return norm
