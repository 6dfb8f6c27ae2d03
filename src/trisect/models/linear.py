"""Read and build linear layers in the row-vector convention, whichever class holds them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.pytorch_utils import Conv1D

from trisect.errors import TrisectError
from trisect.records.parts import LINEARS, MLP, OV, Factored
from trisect.records.shapes import STRICT

QKV = ("q", "k", "v")

Dense = tuple[Tensor, Tensor | None]  # weight (in, out) and bias (out,) of one map, heads side by side as stored


@dataclass(frozen=True)
class FusedMaps:
    """Several linear maps of one input as one matrix, of which the modules' own weights are rows."""

    modules: tuple[nn.Linear, ...]
    weights: tuple[Tensor, ...]
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    def applies(self, modules: Sequence[nn.Module]) -> bool:
        """Whether calling this is the same as calling the modules: gradients need those."""
        return not torch.is_grad_enabled() and self.holds(modules)

    def holds(self, modules: Sequence[nn.Module]) -> bool:
        """Whether these are still the modules, and their weights still rows of the matrix."""
        if torch.compiler.is_compiling():
            # Nothing replaces modules inside, and asking who they are would compile every layer anew.
            return True
        each = zip(modules, self.modules, self.weights, strict=True)
        same = all(now is then and then._parameters["weight"] is row for now, then, row in each)
        return same and self.weights[0].data_ptr() == self.weight.data_ptr()


def fused_maps(modules: Sequence[nn.Module]) -> FusedMaps | None:
    """One matrix for all, which replaces the modules' own memory; None unless all are plain linear layers."""
    linears = tuple(module for module in modules if type(module) is nn.Linear)
    biases = [linear.bias for linear in linears if linear.bias is not None]
    kinds = {(linear.weight.dtype, linear.weight.device) for linear in linears}
    if len(linears) != len(modules) or len(biases) not in (0, len(linears)) or len(kinds) != 1:
        return None
    if linears[0].weight.is_meta:
        return None

    def joined(name: str) -> Tensor:
        old = [getattr(linear, name) for linear in linears]
        whole = torch.cat([parameter.detach() for parameter in old])
        for linear, parameter, rows in zip(linears, old, whole.split([len(p) for p in old]), strict=True):
            setattr(linear, name, nn.Parameter(rows, requires_grad=parameter.requires_grad))
        return whole

    weight, bias = joined("weight"), joined("bias") if biases else None
    return FusedMaps(linears, tuple(linear.weight for linear in linears), weight, bias)


# g = groups, r = rank of a group


class GroupedLinear(nn.Module):
    """A block-diagonal linear map: each group of inputs makes its own group of outputs."""

    bias: nn.Parameter | None

    def __init__(self, groups: int, rank: int, out_features: int, *, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, rank, out_features // groups))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, self.weight.shape[:2])  # (..., g r) -> (..., g, r)
        y = torch.einsum("...gr,gro->...go", groups, self.weight).flatten(-2)
        return y if self.bias is None else y + self.bias


class FactoredLinear(nn.Module):
    """y = wide(narrow(x)): what is left of a linear map of low rank."""

    def __init__(
        self, in_features: int, out_features: int, *, rank: int, groups: int, bias: bool, cached: bool = False
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.rank, self.groups = rank, groups
        self.cached = cached  # the KV cache may hold `narrow(x)`; attention decides whether anything stands between
        self.narrow = nn.Linear(in_features, groups * rank, bias=False)
        grouped = GroupedLinear(groups, rank, out_features, bias=bias) if groups > 1 else None
        self.wide: nn.Linear | GroupedLinear = grouped or nn.Linear(rank, out_features, bias=bias)

    @classmethod
    def of(cls, old: Any, solution: Factored) -> "FactoredLinear":
        """The module a solution stands for, with the dtype and mode of the module it replaces."""
        groups, rank, width = solution.B.shape
        how: Any = {"rank": rank, "groups": groups, "bias": solution.b is not None, "cached": solution.cached}
        with torch.device("meta"):
            new = cls(solution.A.shape[0], groups * width, **how)

        def parameter(value: Tensor) -> nn.Parameter:
            # A copy: solvers hand out slices of one SVD, and what is saved must not share memory.
            stored = value.to(old.weight.dtype).clone(memory_format=torch.contiguous_format)
            return nn.Parameter(stored, requires_grad=old.weight.requires_grad)

        new.narrow.weight = parameter(solution.A.T)
        new.wide.weight = parameter(solution.B[0].T if groups == 1 else solution.B)
        if solution.b is not None:
            new.wide.bias = parameter(solution.b)
        return new.train(old.training)

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self.wide.bias
        return bias

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x))


class SplitLinear(nn.Module):
    """Several maps of one input, one child each, put out in the order of the fused matrix they replace."""

    def __init__(self, maps: Mapping[str, nn.Module], *, heads: int | None):
        """With `heads`, the outputs lie head by head; else side by side."""
        super().__init__()
        self.heads = heads
        for name, module in maps.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.joined([module(x) for module in self.children()], self.heads)

    @staticmethod
    def joined(columns: Sequence[Tensor], heads: int | None) -> Tensor:
        """(..., out) of several maps -> (..., out) of the matrix that holds them all."""
        if heads is None:
            return torch.cat(list(columns), dim=-1)
        return torch.cat([x.unflatten(-1, (heads, -1)) for x in columns], dim=-1).flatten(-2)


def refuse_nan(tensor: Tensor, what: str) -> None:
    """Refuse weights with NaN or inf by name; layers that are still in their files are looked at when read."""
    if tensor.is_floating_point() and not tensor.is_meta and not tensor.isfinite().all():
        damaged = "the checkpoint is damaged or was saved from a run that diverged"
        raise TrisectError(f"{what} holds NaN or inf; {damaged}. Nothing was written.")


def weight_of(linear: Any, *, gradient: bool = False) -> Any:
    """(in, out) view of the weight, so that y = x W; or of its gradient, None before any backward pass."""
    if isinstance(linear, FactoredLinear | GroupedLinear | SplitLinear):
        raise TrisectError("A linear map is already factored; compress the original model.")
    if not is_linear(linear) and not isinstance(linear, Conv1D):
        other = f"Cannot read a {type(linear).__name__} as a plain linear layer"
        raise TrisectError(f"{other}: pass the original weights, compressed first and quantised afterwards.")
    stored = linear.weight.grad if gradient else linear.weight.detach()
    return stored if stored is None or isinstance(linear, Conv1D) else stored.T


def matrices_of(module: Any) -> list[Tensor]:
    """The weights of a projection, or of all routed experts; empty for modules that only hold others."""
    if isinstance(getattr(module, "weight", None), Tensor):
        return [module.weight] if module.weight.ndim > 1 else []
    return [parameter for parameter in module.parameters(recurse=False) if parameter.ndim > 2]


def bias_of(linear: Any) -> Tensor | None:
    return None if linear.bias is None else linear.bias.detach()


def sizes_of(linear: Any) -> tuple[int, int]:
    """Inputs and outputs, factored or quantised or neither."""
    known = isinstance(linear, FactoredLinear | QuantizedLinear)
    d_in, d_out = (linear.in_features, linear.out_features) if known else weight_of(linear).shape
    return d_in, d_out


def as_mlp(maps: Mapping[str, Dense]) -> MLP:
    """An MLP of its maps by name; one without a gate has none among them."""
    fields: Any = {f"W_{name}": W for name, (W, _) in maps.items()} | {f"b_{name}": b for name, (_, b) in maps.items()}
    return MLP(**fields)


def as_maps(mlp: MLP) -> dict[str, Dense]:
    """Undo `as_mlp`."""
    found = {name: (getattr(mlp, f"W_{name}"), getattr(mlp, f"b_{name}")) for name in LINEARS["mlp"]}
    return {name: dense for name, dense in found.items() if dense[0] is not None}


WIDE = set("W_q W_k b_q b_k norm_q norm_k W_v b_v W_g b_g W_up W_gate b_up b_gate".split())
"""Fields of parts whose last dimension is the inner width."""


def resized(part: Any, width: int) -> Any:
    """QK, OV or an MLP with another inner width: zeros behind the channels, or the last ones cut off."""
    more = width - part.width
    changes = {name: pad(x, (0, more)) for name, x in vars(part).items() if name in WIDE and x is not None}
    if isinstance(part, MLP | OV):
        outer = "W_down" if isinstance(part, MLP) else "W_o"
        changes[outer] = pad(getattr(part, outer), (0, 0, 0, more))
    return replace(part, **changes)


def built_from(old: Any, weight: Tensor, bias: Tensor | None, *, plain: bool = False) -> nn.Module:
    """A projection of the same class, dtype and mode as `old` with (in, out) weight and bias."""
    # `plain` makes it an nn.Linear whatever the class was.
    d_in, d_out = weight.shape
    with torch.device("meta"):
        transposed = isinstance(old, Conv1D) and not plain
        new = Conv1D(d_out, d_in) if transposed else nn.Linear(d_in, d_out, bias=False)
    for name, value in (("weight", weight if transposed else weight.T), ("bias", bias)):
        if value is not None:
            stored = value.to(old.weight.dtype).contiguous()
            setattr(new, name, nn.Parameter(stored, requires_grad=old.weight.requires_grad))
    return new.train(old.training)


# n = values of a row


def pack(values: Tensor, bits: int) -> Tensor:
    """(rows, n) integers below 2^bits -> (rows, n * bits / 8) bytes."""
    return _regrouped(values, bits, 8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """(rows, n * bits / 8) bytes -> (rows, n) integers below 2^bits."""
    return _regrouped(packed, 8, bits)


def _regrouped(x: Tensor, old: int, new: int) -> Tensor:
    """(rows, n) integers of `old` bits -> (rows, n * old / new) of `new` bits: the same bits in the same order."""
    word = math.lcm(old, new)  # bits that whole integers of both kinds fill: 3 bits need three bytes
    words = x.to(torch.uint8 if word == 8 else torch.int32)
    if word > old:  # no bit is set twice, so a sum is a union
        words = (words.unflatten(-1, (-1, word // old)) << _places(words, old, word)).sum(dim=-1, dtype=words.dtype)
    if word == new:
        return words
    return ((words.unsqueeze(-1) >> _places(words, new, word)) & (2**new - 1)).to(torch.uint8).flatten(-2)


def _places(words: Tensor, step: int, word: int) -> Tensor:
    return torch.arange(0, word, step, dtype=words.dtype, device=words.device)


BITS = (8, 4, 3, 2)
# Scales and zeros are kept as the bits of floats, because casting a model casts every floating buffer.
SCALES = {"float16": (torch.float16, torch.int16), "float32": (torch.float32, torch.int32)}


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How one weight is held."""

    __pydantic_config__ = STRICT
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
            groups = f"groups of {packing.group_size} for {path}, whose {d_in} inputs they do not divide"
            raise TrisectError(f"config.json has {groups}; the folder was changed after trisect wrote it.")
        model.set_submodule(path, QuantizedLinear(d_in, d_out, packing, bias=old.bias is not None))


def packing_summary(entry: Any) -> dict[str, Any] | None:
    """How many modules are held in how many bits, of a `quantization` entry."""
    if entry is None:
        return None
    bits = [held["bits"] for held in entry["modules"].values()]
    return {"backend": entry.get("backend"), "modules_by_bits": {str(b): bits.count(b) for b in sorted({*bits})}}
