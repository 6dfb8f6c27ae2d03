"""The weights of a GGUF file: llama.cpp's names, order of channels and kinds of numbers, one at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from torch import Tensor

from trisect.export.gguf_read import FACTORS, HALVED, NAMES, interleaved
from trisect.export.rotation import SAME, stock_factors
from trisect.export.stock import Stock
from trisect.models import family_for

KINDS = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
DTYPES = {"f32": np.float32, "f16": np.float16, "q8_0": np.uint8}
BLOCK = 32
"""Weights that share one scale in q8_0: a row must be a whole number of them."""


@dataclass(frozen=True)
class FileTensor:
    """One tensor of the file, not made before it is written."""

    name: str
    shape: tuple[int, ...]
    kind: str
    make: Callable[[], Tensor]

    def announce(self, writer: Any) -> None:
        """Tell the writer what will come: all tensors are listed before the first is written."""
        shape = self.shape
        if self.kind == "q8_0":
            shape = gguf.quant_shape_to_byte_shape(shape, KINDS[self.kind])
        dtype = np.dtype(DTYPES[self.kind])
        size = int(np.prod(shape)) * dtype.itemsize
        writer.add_tensor_info(self.name, shape, dtype, size, raw_dtype=KINDS[self.kind])

    def array(self) -> Any:
        """The numbers as the file holds them."""
        return gguf.quants.quantize(self.make().contiguous().float().cpu().numpy(), KINDS[self.kind])


def file_tensors(config: Any, stock: Stock, kind: str) -> list[FileTensor]:
    """All weights, in the order in which they are written."""
    found = []
    factors = rotation_factors(config, stock)
    if factors is not None:
        found.append(FileTensor(FACTORS, (len(factors),), "f32", lambda: Tensor(factors)))
    for name, tensor in stock.tensors.items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue

        def make(name: str = name, tensor: Tensor = tensor) -> Tensor:
            return _native(name, tensor, config, stock)

        shape = tuple(make().shape)
        fits = kind != "q8_0" or shape[-1] % BLOCK == 0
        chosen = "f32" if len(shape) == 1 else kind if fits else "f16"
        found.append(FileTensor(_name(name), shape, chosen, make))
    return found


def write_tensors(writer: Any, tensors: list[FileTensor]) -> None:
    """Everything that was said about the file, then tensor after tensor."""
    for tensor in tensors:
        tensor.announce(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.array())
    writer.close()


def rotation_factors(config: Any, stock: Stock) -> list[float] | None:
    """Divisors of llama.cpp's own frequencies, None where those are the model's."""
    assert stock.rates is not None
    factors = stock_factors(stock.rates, float(config.rope_parameters["rope_theta"]))
    return None if max(abs(factor - 1) for factor in factors) <= SAME else factors


def needs_deci(stock: Stock) -> bool:
    """llama.cpp reads MLP widths per layer for this architecture; its biases are sized for whole heads."""
    special = any(name.endswith(".bias") or "_norm." in name for name in stock.tensors)
    return len(set(stock.mlp_widths)) > 1 and not special


def _native(name: str, tensor: Tensor, config: Any, stock: Stock) -> Tensor:
    """A tensor in llama.cpp's order of channels, and no wider than its layer needs."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    kind = name.split(".")[-2]
    if kind in heads and family_for(config).name not in HALVED:
        return interleaved(tensor, heads[kind])
    if ".mlp." in name and needs_deci(stock):
        width = stock.mlp_widths[int(name.split(".")[2])]
        return tensor[:, :width] if ".down_proj." in name else tensor[:width]
    return tensor


def _name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight"""
    stem, _, ending = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{NAMES[stem]}.{ending}"
    _, _, index, inner = stem.split(".", 3)
    return f"blk.{index}.{NAMES[inner]}.{ending}"
