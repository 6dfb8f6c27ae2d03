"""The libraries that choose levels, scales and zeros; what they choose is held by QuantizedLinear."""

from typing import Any

import torch
from torch import Tensor, nn

from trisect.errors import TrisectError
from trisect.models.quantized import Levels, Packing


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
