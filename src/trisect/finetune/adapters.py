"""LoRA adapters on the decoder's own linear maps: attach, and merge into the narrow weights."""

import warnings
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trisect.config.verbs import TuneConfig
from trisect.errors import TrisectError, check_names
from trisect.models import layer_views
from trisect.models.compressed import mark_quantized
from trisect.models.linear import QuantizedLinear
from trisect.quantize import QuantizeConfig, weights


class QuantizedBase(nn.Linear):
    """A quantised map as the linear module, without a weight, that peft puts an adapter on."""

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


def target_modules(model: nn.Module, targets: tuple[str, ...] | None) -> dict[str, nn.Module]:
    """Module name -> module of the chosen maps, in the model's order."""
    # A map that is fused with others brings them along; a factored one has two modules. Block-diagonal factors
    # hold no plain matrix and stay as they are.
    views = layer_views(model)
    known = tuple(dict.fromkeys(name for view in views for name in view.linears()))
    check_names("linear map", targets or (), known)
    wanted = known if targets is None else targets
    inside = {
        id(m) for view in views for name in wanted if name in view.linears() for m in view.module(name).modules()
    }
    return {
        name: module
        for name, module in model.named_modules()
        if id(module) in inside and isinstance(module, nn.Linear | Conv1D | QuantizedLinear)
    }


def attach(model: Any, config: TuneConfig) -> Any:
    """The model with fresh adapters, of which alone the parameters train; drawn from torch's global seed."""
    modules = target_modules(model, config.targets)
    if not modules:
        raise TrisectError("None of the chosen maps is a plain matrix, which adapters need; choose other --targets.")
    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(modules),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in modules.values()),
    )
    for path, module in modules.items():
        if isinstance(module, QuantizedLinear):
            model.set_submodule(path, QuantizedBase(module))
    with warnings.catch_warnings():
        # peft takes each layer's own layout and warns that the one in its config does not fit them all.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        return peft.get_peft_model(model, lora)


def merge(adapted: Any) -> Any:
    """The model itself, no adapter left: each W is W + alpha / rank B A, quantised again if it was."""
    # Where it was, what the adapter adds below half a step between two levels is rounded away.
    model = adapted.get_base_model()
    quantized = {
        path: layer
        for path, layer in model.named_modules()
        if isinstance(getattr(layer, "base_layer", None), QuantizedBase)
    }
    for path, layer in quantized.items():
        model.set_submodule(path, _sum(layer.base_layer.held, layer.get_delta_weight("default")))
    if quantized:
        mark_quantized(model, backend=model.config.trisect["quantization"]["backend"])
    model = adapted.merge_and_unload()
    model.requires_grad_(True)
    return model


@torch.no_grad()
def _sum(held: QuantizedLinear, delta: Tensor) -> QuantizedLinear:
    """A quantised map plus a change of its weight, in the same bits and groups."""
    plain = nn.Linear(held.in_features, held.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(held.dequantized() + delta.float(), requires_grad=False)
    if held.bias is not None:
        plain.bias = nn.Parameter(held.bias, requires_grad=False)
    backend = "torchao" if held.packing.symmetric else "hqq"
    config = QuantizeConfig(bits=held.packing.bits, backend=backend)
    return weights.quantized_linear(plain.train(held.training), config, held.packing.group_size)


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    """Logits in float32 on the CPU, without dropout."""
    model.eval()
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float().cpu()
