"""The linear maps of a decoder layer by their own names, wherever a checkpoint keeps them.

q, k, v, o, gate, up and down are modules in one family and columns of a fused matrix in another. Modules are
always replaced, never changed inside, so that whoever holds the old ones can put them back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from trisect.errors import TrisectError, unknown_name
from trisect.models.attention import Attention
from trisect.models.families import Family
from trisect.models.linear import (
    QKV,
    FactoredLinear,
    HeadLayout,
    SplitLinear,
    bias_of,
    built_from,
    factored_from,
    fused,
    gradient_of,
    weight_of,
)
from trisect.records.parts import LINEARS, Factored, Linear
from trisect.records.shapes import LinearShape

Dense = tuple[Tensor, Tensor | None]
"""Weight (in, out) and bias (out,) of one map, heads side by side in stored channel order."""


@dataclass(frozen=True)
class Place:
    """Where a map is kept."""

    path: str
    """Of a module, inside the layer."""
    names: tuple[str, ...]
    """The maps that module holds, in order: one, or those fused there."""


@dataclass(frozen=True)
class LayerMaps:
    """One decoder layer as linear maps."""

    index: int
    layer: nn.Module
    family: Family

    @property
    def attention(self) -> Attention:
        module = self.layer.get_submodule(self.family.attention)
        assert isinstance(module, Attention)
        return module

    @property
    def down(self) -> nn.Module:
        return self.layer.get_submodule(self.family.down)

    def linears(self) -> tuple[str, ...]:
        """Names of the maps this layer has."""
        names = [name for component in LINEARS.values() for name in component]
        return tuple(name for name in names if name != "gate" or self.family.gate is not None)

    def linear(self, name: str) -> Linear:
        """One map by itself, channels in stored order."""
        W, b = self.dense(name)
        a = self.attention
        heads = {"q": a.heads, "k": a.kv_heads, "v": a.kv_heads, "o": 1 if a.shared_output else a.heads}
        return Linear(name=name, W=W, b=b, heads=heads.get(name, 1))

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of `linear(name).W`, (in, out); None before any backward pass."""
        gradient = gradient_of(self._unfactored(name))
        return None if gradient is None else self._columns(name, gradient)

    def factored(self) -> tuple[LinearShape, ...]:
        """The maps that became two."""
        modules = ((name, self.module(name)) for name in self.linears())
        return tuple(
            LinearShape(name=name, rank=module.rank, groups=module.groups, cached=module.cached)
            for name, module in modules
            if isinstance(module, FactoredLinear)
        )

    def module(self, name: str) -> nn.Module:
        """The module that computes a map: its own, or the one it is fused into."""
        module = self.layer.get_submodule(self._place(name).path)
        return module.get_submodule(name) if isinstance(module, SplitLinear) else module

    def projections(self) -> list[nn.Module]:
        """The modules whose `weight` belongs to a linear map; a factored map has two."""
        paths = dict.fromkeys(self._place(name).path for name in self.linears())
        inside = [module for path in paths for module in self.layer.get_submodule(path).modules()]
        return [module for module in inside if isinstance(getattr(module, "weight", None), Tensor)]

    def dense(self, name: str) -> Dense:
        """Weight and bias of a map that is not factored."""
        module = self._unfactored(name)
        bias = bias_of(module)
        return self._columns(name, weight_of(module)), None if bias is None else self._columns(name, bias)

    def write_dense(self, new: Mapping[str, Dense], *, layout: HeadLayout | None = None) -> None:
        """Replace weights and biases; `layout` says how heads lie afterwards, if not as before."""
        layout = layout or self.attention.layout
        for name in new:
            self._unfactored(name)
        for place in dict.fromkeys(map(self._place, new)):
            old = self.layer.get_submodule(place.path)
            heads = layout if place.names == QKV else None
            if isinstance(old, SplitLinear):
                built = {
                    name: built_from(self.module(name), *new[name]) for name in place.names if name in new
                }
                module: nn.Module = SplitLinear({**dict(old.named_children()), **built}, layout=heads)
            else:
                maps = [new[name] if name in new else self.dense(name) for name in place.names]
                module = built_from(old, *_joined(maps, heads))
            self.layer.set_submodule(place.path, module)

    def write_linear(self, part: Linear) -> None:
        """Replace one map's values; sizes stay, or its neighbours would no longer fit."""
        W, b = self.dense(part.name)
        if part.W.shape != W.shape or (part.b is None) != (b is None):
            raise TrisectError(
                f"Layer {self.index}: {part.name} is a {tuple(W.shape)} map {_with_bias(b)}; a "
                f"{tuple(part.W.shape)} one {_with_bias(part.b)} cannot take its place."
            )
        self.write_dense({part.name: (part.W, part.b)})

    def write_factored(self, solution: Factored) -> None:
        """Two modules in place of one map; maps it was fused with become modules of their own."""
        name = solution.name
        self.check_factors(
            LinearShape(name=name, rank=solution.rank, groups=solution.groups, cached=solution.cached)
        )
        W, b = self.dense(name)
        inner = solution.groups * solution.rank
        makes = solution.A.shape[0], solution.groups * solution.B.shape[2]
        if solution.A.shape[1] != inner or makes != W.shape or (solution.b is None) != (b is None):
            raise TrisectError(
                f"Layer {self.index}: {name} is a {tuple(W.shape)} map {_with_bias(b)}, but factors "
                f"{tuple(solution.A.shape)} and {tuple(solution.B.shape)} {_with_bias(solution.b)} are not."
            )
        place = self._place(name)
        module: nn.Module = factored_from(self.module(name), solution)
        if len(place.names) > 1:
            module = self._split(place, name, module)
        self.layer.set_submodule(place.path, module)

    def check_factors(self, linear: LinearShape) -> None:
        """Refuse factors that a map of this layer cannot have."""
        W, _ = self.dense(linear.name)
        d_in, d_out = W.shape
        if linear.cached and linear.name not in ("k", "v"):
            raise TrisectError(f"Layer {self.index}: {linear.name} is never cached; only k and v are.")
        if (
            linear.groups < 1
            or d_out % linear.groups
            or not 1 <= linear.rank <= min(d_in, d_out // linear.groups)
        ):
            raise TrisectError(
                f"Layer {self.index}: {linear.name} maps {d_in} channels to {d_out}; it cannot have "
                f"{linear.groups} groups of rank {linear.rank}."
            )

    def _split(self, place: Place, name: str, factored: nn.Module) -> SplitLinear:
        old = self.layer.get_submodule(place.path)
        maps: dict[str, nn.Module] = {}
        for other in place.names:
            if other == name:
                maps[other] = factored
            elif isinstance(old, SplitLinear):
                maps[other] = old.get_submodule(other)
            else:
                # Copies: columns of the fused matrix would keep all of it in memory.
                W, b = self.dense(other)
                maps[other] = built_from(old, W.clone(), None if b is None else b.clone(), plain=True)
        return SplitLinear(maps, layout=self.attention.layout if place.names == QKV else None)

    def _place(self, name: str) -> Place:
        f = self.family
        if name not in self.linears():
            raise unknown_name("linear map", name, self.linears())
        if name in QKV and len(f.qkv) == 1:
            return Place(f"{f.attention}.{f.qkv[0]}", QKV)
        if name in ("gate", "up") and f.gate == f.up:
            return Place(f.up, ("gate", "up"))
        if name in QKV:
            return Place(f"{f.attention}.{f.qkv[QKV.index(name)]}", (name,))
        path = f"{f.attention}.{f.o}" if name == "o" else getattr(f, name)
        return Place(path, (name,))

    def _unfactored(self, name: str) -> nn.Module:
        module = self.module(name)
        if isinstance(module, FactoredLinear):
            raise TrisectError(
                f"Layer {self.index}: {name} is already factored; compress the original model."
            )
        return module

    def _columns(self, name: str, x: Tensor) -> Tensor:
        """The map's own columns of (..., out) of the module that computes it."""
        place = self._place(name)
        if len(place.names) == 1 or isinstance(self.layer.get_submodule(place.path), SplitLinear):
            return x
        number = place.names.index(name)
        if place.names == QKV:
            return self.attention.layout.split([x])[number].flatten(-2)
        return x.chunk(len(place.names), dim=-1)[number]


def _with_bias(b: Tensor | None) -> str:
    return "without bias" if b is None else "with bias"


def _joined(maps: Sequence[Dense], layout: HeadLayout | None) -> Dense:
    """Maps of one input as the one matrix that holds them all."""
    if len(maps) == 1:
        return maps[0]
    biases = [b for _, b in maps if b is not None]
    return fused([W for W, _ in maps], layout), fused(biases, layout) if biases else None
