"""Adapters on quantised maps: the base stays in its few bits while adapters learn (QLoRA).

peft knows plain linear modules, and asks them for nothing but sizes and a forward pass until it merges. So a
quantised map is dressed up as one, and merged here: dequantise, add, quantise as before.
"""

from typing import Any

import torch
from torch import Tensor, nn

from trisect.models.compressed import mark_quantized
from trisect.models.quantized import QuantizedLinear
from trisect.quantize import QuantizeConfig
from trisect.quantize.apply import quantized_linear


class DressedUp(nn.Linear):
    """A quantised map that passes for a linear module without a weight."""

    def __init__(self, held: QuantizedLinear):
        nn.Module.__init__(self)  # not Linear's own, which makes a weight
        self.in_features, self.out_features = held.in_features, held.out_features
        self.held = held
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)

    @property
    def qweight(self) -> Tensor:
        """peft puts adapters on the device of this."""
        return self.held.packed

    def forward(self, x: Tensor) -> Tensor:
        return self.held(x)


def dress_up(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Put the quantised ones of these modules into their dress."""
    for path, module in modules.items():
        if isinstance(module, QuantizedLinear):
            model.set_submodule(path, DressedUp(module))


def merge_quantized(adapted: Any) -> None:
    """Replace every adapted quantised map by its sum with the adapter, in the same bits and groups.

    What the adapter adds below half a step between two levels is rounded away again.
    """
    model = adapted.get_base_model()
    layers = {
        path: layer
        for path, layer in model.named_modules()
        if isinstance(getattr(layer, "base_layer", None), DressedUp)
    }
    for path, layer in layers.items():
        held = layer.base_layer.held
        model.set_submodule(path, _sum(held, layer.get_delta_weight("default")))
    if layers:
        mark_quantized(model, backend=model.config.trisect["quantization"]["backend"])


@torch.no_grad()
def _sum(held: QuantizedLinear, delta: Tensor) -> QuantizedLinear:
    plain = nn.Linear(held.in_features, held.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(held.dequantized() + delta.float(), requires_grad=False)
    if held.bias is not None:
        plain.bias = nn.Parameter(held.bias, requires_grad=False)
    backend = "torchao" if held.packing.symmetric else "hqq"
    config = QuantizeConfig(bits=held.packing.bits, backend=backend)
    return quantized_linear(plain.train(held.training), config, held.packing.group_size)
