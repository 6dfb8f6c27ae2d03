"""Quantise a model in place."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trisect.errors import TrisectError, unknown_name
from trisect.models import layer_views, mark_compressed, original_widths
from trisect.models.compressed import CompressedModel, mark_quantized
from trisect.models.linear import bias_of, sizes_of, weight_of
from trisect.models.quantized import BITS, Levels, Packing, QuantizedLinear
from trisect.models.view import LayerView
from trisect.records.parts import COMPONENTS, LINEARS

BACKENDS = ("hqq", "torchao")
AUTO_SIZES = (128, 64, 32, 16, 8)
"""Group sizes that `auto` tries for a layer, in this order."""


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Which weights are held in how many bits, and by whose rule."""

    bits: int = 4
    group_size: int | None = None
    """None: for every layer the largest of AUTO_SIZES that divides its inputs (torchao: whole rows)."""
    backend: str = "hqq"
    parts: tuple[str, ...] = COMPONENTS
    lm_head: bool = False

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise unknown_name("backend", self.backend, BACKENDS)
        if self.bits not in BITS:
            raise TrisectError(
                f"Cannot quantise to {self.bits} bits; use one of {', '.join(map(str, BITS))}."
            )
        for part in self.parts:
            if part not in COMPONENTS:
                raise unknown_name("part", part, COMPONENTS)
        if not self.parts:
            raise TrisectError(f"No part was named to quantise; use some of {','.join(COMPONENTS)}.")
        if self.backend == "torchao" and (self.bits != 8 or self.group_size is not None):
            raise TrisectError(
                "torchao quantises to 8 bits with one scale per output here; type --backend torchao --bits 8 "
                "without --group-size, or --backend hqq."
            )
        if self.group_size is not None and (self.group_size < 8 or self.group_size % 8):
            raise TrisectError(
                f"A group size must be a multiple of 8, got {self.group_size}; try 64, or auto."
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_group_size(text: str) -> int | None:
    """`auto` or a number."""
    if text == "auto":
        return None
    if not text.isascii() or not text.isdigit():
        raise TrisectError(f"A group size is a number such as 64, or auto; got {text!r}.")
    return int(text)


def require(backend: str) -> None:
    """Refuse before the work, if the library is not installed."""
    try:
        _hqq() if backend == "hqq" else _torchao()
    except ImportError as error:
        raise TrisectError(
            f"Quantising with {backend} needs packages that are not installed ({error}); "
            "type: pip install 'trisect[quantize]'"
        ) from error


def hqq_levels(weight: Tensor, *, bits: int, group_size: int) -> tuple[Levels, Packing]:
    """HQQ with its own defaults, groups along the inputs; weight is (out, in)."""
    quantizer, base_config = _hqq()
    settings = base_config(nbits=bits, group_size=group_size, axis=1)["weight_quant_params"]
    values, meta = quantizer.quantize(weight.float(), **settings, bitpack=False, device=str(weight.device))
    out, groups = len(weight), weight.shape[1] // group_size
    scale, zero = (meta[name].view(out, groups) for name in ("scale", "zero"))
    # HQQ keeps scales and zeros in 16 bits; far from zero, a group of almost equal weights can exceed them.
    fits = all(bool(x.half().isfinite().all()) for x in (scale, zero))
    packing = Packing(bits=bits, group_size=group_size, scales="float16" if fits else "float32")
    return Levels(values=values.view(weight.shape).to(torch.uint8), scale=scale, zero=zero), packing


def torchao_levels(weight: Tensor) -> tuple[Levels, Packing]:
    """torchao's int8 weights: symmetric, one float32 scale per output; weight is (out, in)."""
    quantize, config = _torchao()
    linear = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    linear.weight = nn.Parameter(weight.float(), requires_grad=False)
    # Its settings for torch.compile are for the whole process, which is not ours to configure.
    quantize(linear, config(set_inductor_config=False))
    held: Any = linear.weight
    values = (held.qdata.to(torch.int16) + 128).to(torch.uint8)
    packing = Packing(bits=8, group_size=weight.shape[1], scales="float32", symmetric=True)
    return Levels(values=values, scale=held.scale.view(-1, 1), zero=None), packing


def _hqq() -> tuple[Any, Any]:
    from hqq.core.quantize import BaseQuantizeConfig, Quantizer

    return Quantizer, BaseQuantizeConfig


def _torchao() -> tuple[Any, Any]:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    return quantize_, Int8WeightOnlyConfig


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


Progress = Callable[[int, int], None]


def quantize_model(model: Any, config: QuantizeConfig, *, progress: Progress | None = None) -> Any:
    """Replace the linear modules of the decoder layers by quantised ones; the model is changed and returned.

    What can be refused is refused before anything is changed. A stock model becomes a trisect one of full
    width, so that it is saved and loaded like a compressed one.
    """
    require(config.backend)
    modules = chosen_modules(model, config)
    sizes = group_sizes(modules, config)
    for path, module in modules.items():
        if not weight_of(module).isfinite().all():
            raise TrisectError(f"{path} holds NaN or inf; the checkpoint is damaged. Nothing was written.")
    if not isinstance(model, CompressedModel):
        mark_compressed(model, original=original_widths(model), method="none", ratio=0.0)
    if config.lm_head:
        _untie(model)
    for done, (path, module) in enumerate(modules.items()):
        model.set_submodule(path, quantized_linear(module, config, sizes[path]))
        if progress is not None:
            progress(done + 1, len(modules))
    mark_quantized(model, backend=config.backend)
    return model


@torch.no_grad()
def quantized_linear(old: nn.Module, config: QuantizeConfig, group_size: int) -> QuantizedLinear:
    """One linear module, nn.Linear or GPT-2's Conv1D, in fewer bits."""
    weight: Tensor = weight_of(old).T.contiguous()  # (out, in), also for GPT-2's transposed layers
    if config.backend == "hqq":
        levels, packing = hqq_levels(weight, bits=config.bits, group_size=group_size)
    else:
        levels, packing = torchao_levels(weight)
    bias = bias_of(old)
    with torch.device("meta"):
        new = QuantizedLinear(weight.shape[1], len(weight), packing, bias=bias is not None)
    new.fill(levels, bias)
    return new.train(old.training)


def _untie(model: Any) -> None:
    """A quantised head cannot share the embedding's weight."""
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}
