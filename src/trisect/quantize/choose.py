"""Which modules are quantised, and in groups of what size."""

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from trisect.errors import TrisectError
from trisect.models import layer_views
from trisect.models.linear import sizes_of
from trisect.models.quantized import QuantizedLinear
from trisect.models.view import LayerView
from trisect.parts import LINEARS
from trisect.quantize.config import AUTO_SIZES, QuantizeConfig


def chosen_modules(model: nn.Module, config: QuantizeConfig) -> dict[str, nn.Module]:
    """Path -> module, in the order of the model; refuses a model that is quantised already."""
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            raise TrisectError(
                f"{path} is quantised already; quantise the folder that this one was made from."
            )
    wanted = [module for view in layer_views(model) for module in _projections(view, config.parts)]
    if config.lm_head:
        wanted.append(_head(model))
    chosen = {id(module) for module in wanted}
    return {path: module for path, module in model.named_modules() if id(module) in chosen}


def group_sizes(modules: dict[str, nn.Module], config: QuantizeConfig) -> dict[str, int]:
    """Path -> group size, all of them checked against the layers' inputs before anything is changed.

    hqq itself only asks that the size divides the number of weights, and then lets groups straddle rows.
    """
    sizes = {}
    for path, module in modules.items():
        inputs, _ = sizes_of(module)
        if config.backend == "torchao":
            sizes[path] = inputs
            continue
        fitting = [size for size in AUTO_SIZES if inputs % size == 0]
        if not fitting:
            raise TrisectError(
                f"{path} has {inputs} inputs, which no group size divides ({_listed(AUTO_SIZES)}); compress "
                "with --align 8 or 16, leave the part out with --parts, or use --backend torchao --bits 8."
            )
        if config.group_size is not None and inputs % config.group_size:
            raise TrisectError(
                f"Groups of {config.group_size} do not divide the {inputs} inputs of {path}; "
                f"{_listed(fitting)} do, or type --group-size auto for a size per layer."
            )
        sizes[path] = config.group_size or fitting[0]
    return sizes


def _projections(view: LayerView, parts: tuple[str, ...]) -> list[nn.Module]:
    """The plain linear modules of the parts; one that holds maps of several parts needs all of them."""
    wanted = [name for part in parts for name in LINEARS[part] if name in view.linears()]
    inside = {id(module): module for name in wanted for module in view.module(name).modules()}
    for part, names in LINEARS.items():
        others = [name for name in names if name in view.linears() and part not in parts]
        if any(id(view.module(name)) in inside for name in others):
            raise TrisectError(
                f"One matrix of layer {view.index} holds maps of {part} and of {','.join(parts)}: "
                f"quantise them together, --parts {','.join([*parts, part])}."
            )
    return [m for m in inside.values() if type(m) is nn.Linear or isinstance(m, Conv1D)]


def _head(model: Any) -> nn.Module:
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise TrisectError(
            f"The model's head is no plain linear layer ({type(head).__name__}): no --lm-head."
        )
    return head


def _listed(sizes: Any) -> str:
    return ", ".join(map(str, sizes))
