"""LoRA adapters on the decoder's own linear maps: attach, and merge into the narrow weights."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trisect.errors import TrisectError, unknown_name
from trisect.finetune.config import TuneConfig
from trisect.models import layer_views
from trisect.models.compressed import mark_quantized
from trisect.models.quantized import QuantizedLinear
from trisect.quantize import QuantizeConfig
from trisect.quantize.weights import quantized_linear


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


def target_modules(model: nn.Module, targets: tuple[str, ...] | None) -> dict[str, nn.Module]:
    """Module name -> module of the chosen maps, in the model's order.

    A map that is fused with others brings them along; a factored one has two modules. Block-diagonal factors
    hold no plain matrix and stay as they are.
    """
    views = layer_views(model)
    known = views[0].linears()
    for name in targets or ():
        if name not in known:
            raise unknown_name("linear map", name, known)
    inside = {
        id(module)
        for view in views
        for name in (known if targets is None else targets)
        for module in view.module(name).modules()
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
        raise TrisectError(
            "None of the chosen maps is a plain matrix, so no adapter fits; choose others with --targets."
        )
    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=list(modules),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in modules.values()),
    )
    dress_up(model, modules)
    with _mixed_layouts_allowed():
        adapted = peft.get_peft_model(model, lora)
    found = sum(name.endswith(".lora_A") for name, _ in adapted.named_modules())
    if found != len(modules):
        raise TrisectError(
            f"peft put {found} adapters where {len(modules)} were meant; this is a mistake of trisect, "
            "please report it."
        )
    return adapted


def adapter_parameters(adapted: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter of everything that trains."""
    return {name: p for name, p in adapted.named_parameters() if p.requires_grad}


def merge(adapted: Any) -> Any:
    """The model itself, no adapter left: each W is W + alpha / rank B A, quantised again if it was."""
    merge_quantized(adapted)
    model = adapted.merge_and_unload()
    model.requires_grad_(True)
    return model


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    """Logits in float32 on the CPU, without dropout."""
    model.eval()
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float().cpu()


@contextmanager
def _mixed_layouts_allowed() -> Iterator[None]:
    """peft takes each layer's own layout and warns that the one in its config does not fit them all."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        yield
