"""Make a model ready for inference where it stands; its weights keep their names and values."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers.activations import ACT2FN

from trisect.kernels.elementwise import gated, normed
from trisect.models import LayerView, heads, layer_views, linear, owned

TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""In float64 stock norms still compute in float32, and torch's does not."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SCALES = (1e-4, 1.0, 1e3)  # of the rows two norms are compared on: among the smallest, epsilon is what counts


class FusedNorm(nn.Module):
    """Mixed in before a stock RMS norm: one kernel, which rounds once, where stock rounds twice."""

    weight: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight.dtype != x.dtype or x.dtype not in TYPES:
            return super().forward(x)  # the stock class
        return normed(x, weight, heads.eps_of(self))


def fuse_norm(module: nn.Module) -> None:
    """Let a module run as torch's RMS norm, if that is what it computes."""
    if not isinstance(module, FusedNorm) and is_rms_norm(module):
        owned.mix_in(FusedNorm, module, "Fused")


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module makes the mean square one and scales by its weight: found by trying, not by name."""
    found = dict(module.named_parameters())
    if list(found) != ["weight"] or found["weight"].ndim != 1 or found["weight"].is_meta or list(module.buffers()):
        return False
    if isinstance(module, nn.RMSNorm) or not isinstance(heads.eps_of(module), float):
        return False
    # A forward of the instance's own would win over any class; more arguments mean more than a norm.
    if "forward" in vars(module) or len(inspect.signature(module.forward).parameters) != 1:
        return False
    return all(_agrees(module, dtype) for dtype in TOLERANCE)


def _agrees(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the module gives what torch's norm gives, in a type, for weights and rows made up here."""
    generator = torch.Generator().manual_seed(0)
    own = module.get_parameter("weight")
    weight = torch.rand(own.shape, generator=generator).add(0.5).to(own.device, dtype)
    # Off the middle, or a norm that takes the mean away would look the same.
    rows = torch.randn(len(SCALES), *own.shape, generator=generator).add(0.5)
    x = (rows * torch.tensor(SCALES)[:, None]).to(own.device, dtype)
    # A shallow copy, so that the module keeps its weight; its forward, so that no hook fires.
    double = copy.copy(module)
    double._parameters = {**module._parameters, "weight": nn.Parameter(weight, requires_grad=False)}
    with torch.no_grad():
        found = double.forward(x)
    expected = rms_norm(x, weight.shape, weight, heads.eps_of(module))
    if not isinstance(found, Tensor) or found.dtype != dtype or found.shape != x.shape:
        return False
    return torch.allclose(found, expected, rtol=TOLERANCE[dtype], atol=0)


SEPARATE = ("gate_proj", "up_proj", "down_proj", "act_fn")
PACKED = ("gate_up_proj", "down_proj", "activation_fn")
SILU = (nn.SiLU, type(ACT2FN["silu"]))  # the activation that there is a kernel for; others run as they are


class FusedGate(nn.Module):
    """Mixed in before a stock gated MLP: its forward, with gate and up in one product."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module
    act_fn: nn.Module
    fused: linear.FusedMaps | None

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
    """Mixed in before a stock MLP with this activation whose one projection holds [gate | up] already."""

    gate_up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_up_proj(x)))


def fuse_gate(layer: nn.Module, family: Any) -> None:
    """Fuse gate and up of a decoder layer, if it has both where we know what is computed from them."""
    path, _, up = family.up.rpartition(".")
    if family.gate is None or not path:
        return
    owner: Any = layer.get_submodule(path)
    if family.gate == family.up:
        known = up == PACKED[0] and all(hasattr(owner, name) for name in PACKED)
        if known and isinstance(owner.activation_fn, SILU):
            owned.mix_in(PackedGate, owner, "Fused")
    elif up == SEPARATE[1] and all(hasattr(owner, name) for name in SEPARATE):
        maps = [owner.gate_proj, owner.up_proj]
        before = owner.fused if isinstance(owner, FusedGate) else None
        if before is not None and before.holds(maps):
            return  # a graph somebody recorded may read this very matrix
        fused = linear.fused_maps(maps)
        if fused is not None:
            owned.mix_in(FusedGate, owner, "Fused")
            owner.fused = fused


def compile_layers(views: Sequence[LayerView], **options: Any) -> None:
    """Compile every layer's forward in place; `options` go to torch.compile."""
    # Layers must not differ in anything the compiler looks at but their sizes: attention writes through its own
    # `live` cache layer, not through an index into a list.
    # Each set of widths is a compilation of its own, and torch gives up after a few.
    shapes = {view.shape() for view in views}
    limit = 2 * len(shapes) + 8
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    for view in views:
        view.layer.compile(**options)


def prepare_for_inference(model: Any) -> Any:
    """Fuse q, k and v, and gate and up, into one product each, and let heads be rotated in place.

    The projections' weights become rows of one matrix, so nothing is stored twice, saving is as before and
    gradients still flow (through the projections one by one). Moving or casting the model undoes it. What is
    done to single numbers, in norms and behind the gate, takes one kernel each instead of several, and that
    stays wherever the model goes.
    """
    for view in layer_views(model, own=True):
        attention = view.own()
        if attention is not None:
            attention.prepare()
        if "mlp" in view.components and view.experts is None:
            fuse_gate(view.layer, view.family)
    for module in model.modules():
        fuse_norm(module)
    return model
