"""Make a model ready for inference where it stands; its weights keep their names and values."""

from functools import cache
from typing import Any

from torch import Tensor, nn

from trisect.models import layer_views
from trisect.models.heads import FusedMaps, fused_maps

GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")


def prepare_for_inference(model: Any) -> Any:
    """Fuse q, k and v, and gate and up, into one product each, and let heads be rotated in place.

    The projections' weights become rows of one matrix, so nothing is stored twice, saving is as before and
    gradients still flow (through the projections one by one). Moving or casting the model undoes it.
    """
    for view in layer_views(model):
        view.attention.prepare()
        owner = _gated_mlp(view.layer, view.family)
        if owner is not None:
            _fuse_gate(owner)
    return model


class FusedGate(nn.Module):
    """Mixed in before a stock gated MLP: its forward, with gate and up in one product."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module
    fused: FusedMaps | None

    def forward(self, x: Tensor) -> Tensor:
        # Somebody may have replaced a projection, by a quantised one say, or be training.
        fused = self.fused
        if fused is None or not fused.applies([self.gate_proj, self.up_proj]):
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = fused(x).split(fused.sizes, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.fused = None
        return super()._apply(fn, recurse)


def _gated_mlp(layer: nn.Module, family: Any) -> nn.Module | None:
    """The module around a layer's gate and up, if both are its own and it computes what FusedGate does."""
    path, _, up = family.up.rpartition(".")
    if family.gate is None or family.gate == family.up or up != "up_proj":
        return None
    owner = layer.get_submodule(path)
    return owner if all(hasattr(owner, name) for name in GATED) else None


def _fuse_gate(owner: Any) -> None:
    fused = fused_maps([owner.gate_proj, owner.up_proj])
    if fused is None:
        return
    if not isinstance(owner, FusedGate):
        stock: Any = type(owner)
        owner.__class__ = _fused_class(stock)
    owner.fused = fused


@cache
def _fused_class(stock: Any) -> Any:
    """One class for all layers, or a compiler would take them for different ones."""
    return type(f"Fused{stock.__name__}", (FusedGate, stock), {"__module__": __name__})
