"""Gated MLPs with gate and up in one product, and both halves of it in one kernel."""

from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from trisect.decode.mixing import mix_in
from trisect.kernels.gate import gated
from trisect.models.heads import FusedMaps, fused_maps

SEPARATE = ("gate_proj", "up_proj", "down_proj", "act_fn")
PACKED = ("gate_up_proj", "down_proj", "activation_fn")
SILU = (nn.SiLU, type(ACT2FN["silu"]))
"""The activation that there is a kernel for; others run as they are."""


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
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        if isinstance(self.act_fn, SILU):
            return self.down_proj(gated(fused(x)))
        gate, up = fused(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.fused = None
        return super()._apply(fn, recurse)


class PackedGate(nn.Module):
    """Mixed in before a stock MLP whose one projection holds [gate | up] already."""

    gate_up_proj: nn.Module
    down_proj: nn.Module
    activation_fn: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.activation_fn, SILU):
            return self.down_proj(gated(self.gate_up_proj(x)))
        return super().forward(x)  # the stock class


def fuse_gate(layer: nn.Module, family: Any) -> None:
    """Fuse gate and up of a decoder layer, if it has both where we know what is computed from them."""
    path, _, up = family.up.rpartition(".")
    if family.gate is None or not path:
        return
    owner: Any = layer.get_submodule(path)
    if family.gate == family.up:
        if up == PACKED[0] and all(hasattr(owner, name) for name in PACKED):
            mix_in(PackedGate, owner)
    elif up == SEPARATE[1] and all(hasattr(owner, name) for name in SEPARATE):
        _fuse_separate(owner)


def _fuse_separate(owner: Any) -> None:
    maps = [owner.gate_proj, owner.up_proj]
    before = owner.fused if isinstance(owner, FusedGate) else None
    if before is not None and before.holds(maps):
        return  # a graph somebody recorded may read this very matrix
    fused = fused_maps(maps)
    if fused is not None:
        mix_in(FusedGate, owner)
        owner.fused = fused
