"""A linear map whose weight is held in a few bits: the module, and room for it before weights are loaded.

Nothing here quantises; `trisect.quantize` does, and loading what it wrote needs neither hqq nor torchao.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from trisect.errors import TrisectError

# n = values of a row, w = bytes of a word


def pack(values: Tensor, bits: int) -> Tensor:
    """(rows, n) integers below 2^bits -> (rows, n * bits / 8) bytes."""
    word, count, kind = _word(bits)
    spread = values.to(kind).unflatten(-1, (-1, count)) << _shifts(bits, count, kind, values.device)
    words = spread.sum(dim=-1, dtype=kind)  # no bit is set twice, so a sum is a union
    if word == 1:
        return words
    split = words.unsqueeze(-1) >> _shifts(8, word, kind, values.device)  # (rows, words, w)
    return (split & 0xFF).to(torch.uint8).flatten(-2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """(rows, n * bits / 8) bytes -> (rows, n) integers below 2^bits."""
    word, count, kind = _word(bits)
    words = packed
    if word > 1:
        split = packed.unflatten(-1, (-1, word)).to(kind)
        words = (split << _shifts(8, word, kind, packed.device)).sum(dim=-1, dtype=kind)
    values = words.unsqueeze(-1) >> _shifts(bits, count, kind, packed.device)
    return (values & (2**bits - 1)).to(torch.uint8).flatten(-2)


def _word(bits: int) -> tuple[int, int, torch.dtype]:
    """Bytes of the smallest word that whole values fill, how many do (3 bits need three bytes), and what holds it."""
    word = 1 if 8 % bits == 0 else bits
    return word, word * 8 // bits, torch.uint8 if word == 1 else torch.int32


def _shifts(step: int, count: int, kind: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(0, step * count, step, dtype=kind, device=device)


BITS = (8, 4, 3, 2)
# Scales and zeros are kept as the bits of floats, because casting a model casts every floating buffer.
SCALES = {"float16": (torch.float16, torch.int16), "float32": (torch.float32, torch.int32)}


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How one weight is held."""

    bits: int
    group_size: int  # neighbouring inputs of one output that share a scale
    scales: str = "float16"
    symmetric: bool = False  # no zeros are held: zero is the middle of the range


@dataclass(frozen=True, kw_only=True)
class Levels:
    """A quantised weight: W = (values - zero) * scale, group by group."""

    values: Tensor  # (out, in) integers below 2^bits
    scale: Tensor  # (out, groups)
    zero: Tensor | None  # (out, groups); None when symmetric


class QuantizedLinear(nn.Module):
    """y = x W + b, with W dequantised for every call."""

    packed: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, packing: Packing, *, bias: bool):
        super().__init__()
        self.in_features, self.out_features, self.packing = in_features, out_features, packing
        shape, kind = (out_features, in_features // packing.group_size), SCALES[packing.scales][1]
        self.register_buffer("packed", torch.empty(out_features, in_features * packing.bits // 8, dtype=torch.uint8))
        self.register_buffer("scale", torch.empty(shape, dtype=kind))
        self.register_buffer("zero", None if packing.symmetric else torch.empty(shape, dtype=kind))
        # A buffer as well: a map whose weight is no parameter is not trained, and not counted as one.
        self.register_buffer("bias", torch.empty(out_features) if bias else None)

    @torch.no_grad()
    def fill(self, levels: Levels, bias: Tensor | None) -> None:
        """Take a quantised weight, on whatever device it is."""
        self.packed = pack(levels.values, self.packing.bits)
        self.scale = self._stored(levels.scale)
        self.zero = None if levels.zero is None else self._stored(levels.zero)
        self.bias = None if bias is None else bias.detach().clone()

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight, (out, in); computed in float32 whatever it is rounded to afterwards."""
        values = unpack(self.packed, self.packing.bits).float().unflatten(1, (-1, self.packing.group_size))
        zero = 2 ** (self.packing.bits - 1) if self.zero is None else self._loaded(self.zero).unsqueeze(-1)
        return ((values - zero) * self._loaded(self.scale).unsqueeze(-1)).flatten(1).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.zero is None and self.scale.shape[1] == 1:
            # One scale per output can wait until after the product, where it costs next to nothing.
            values = unpack(self.packed, self.packing.bits).to(x.dtype) - 2 ** (self.packing.bits - 1)
            y = nn.functional.linear(x, values) * self._loaded(self.scale).flatten().to(x.dtype)
            return y if self.bias is None else y + self.bias
        return nn.functional.linear(x, self.dequantized(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.packing}, bias={self.bias is not None}"

    def _stored(self, x: Tensor) -> Tensor:
        dtype, kind = SCALES[self.packing.scales]
        return x.to(dtype).contiguous().view(kind)

    def _loaded(self, x: Tensor) -> Tensor:
        return x.view(SCALES[self.packing.scales][0]).float()


def is_linear(module: Any) -> bool:
    """Whether a module is a plain linear layer, (out, in); other subclasses may hold other things."""
    return type(module) is nn.Linear or type(module).__name__ == "FalconLinear"  # which adds its bias by hand


def make_room(model: Any, entry: Any) -> None:
    """Put empty quantised modules where a config's `quantization` entry says; None changes nothing."""
    if entry is None:
        return
    modules: dict[str, Any] = dict(model.named_modules())
    for path, held in entry["modules"].items():
        old: Any = modules.get(path)
        packing = Packing(**held)
        if not is_linear(old) and not isinstance(old, Conv1D):
            raise TrisectError(f"config.json quantises {path[:80]!r}, which is not a linear layer of this model.")
        d_in, d_out = reversed(old.weight.shape) if is_linear(old) else old.weight.shape
        if d_in % packing.group_size or d_in * packing.bits % 8:
            raise TrisectError(
                f"config.json has groups of {packing.group_size} for {path}, whose {d_in} inputs they do not "
                "divide; the folder was changed after trisect wrote it."
            )
        model.set_submodule(path, QuantizedLinear(d_in, d_out, packing, bias=old.bias is not None))


def packing_entry(model: nn.Module, *, backend: str) -> dict[str, Any]:
    """The `quantization` entry of a config: every quantised module of the model, and how it is held."""
    modules = {path: m for path, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    return {"backend": backend, "modules": {path: asdict(m.packing) for path, m in modules.items()}}


def packing_summary(entry: Any) -> dict[str, Any] | None:
    """How many modules are held in how many bits, of a `quantization` entry."""
    if entry is None:
        return None
    bits = [held["bits"] for held in entry["modules"].values()]
    return {"backend": entry.get("backend"), "modules_by_bits": {str(b): bits.count(b) for b in sorted({*bits})}}
