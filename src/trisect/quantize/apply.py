"""Quantise a model in place."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trisect.errors import TrisectError
from trisect.models import mark_compressed, original_widths
from trisect.models.compressed import CompressedModel, mark_quantized
from trisect.models.linear import bias_of, weight_of
from trisect.models.quantized import QuantizedLinear
from trisect.quantize.backends import hqq_levels, require, torchao_levels
from trisect.quantize.choose import chosen_modules, group_sizes
from trisect.quantize.config import QuantizeConfig

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
