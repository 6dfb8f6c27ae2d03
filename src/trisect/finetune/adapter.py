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
from trisect.finetune.quantized import dress_up, merge_quantized
from trisect.models import layer_views
from trisect.models.quantized import QuantizedLinear


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
