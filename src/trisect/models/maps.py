"""The linear maps of a decoder layer: which are there, where they are stored, and how they are replaced.

q, k, v, o, gate, up and down are modules in one family and columns of a fused matrix in another; a layer may lack
some. Modules are replaced, never changed inside, so that whoever holds the old ones can put them back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn

from trisect.errors import TrisectError, unknown_name
from trisect.models.attention import Attention, HeadLayout, layout_of, norms_of
from trisect.models.experts import ExpertView
from trisect.models.families import Family
from trisect.models.linear import QKV, Dense, FactoredLinear, SplitLinear, bias_of, built_from, matrices_of, weight_of
from trisect.models.owned import latent_query, own
from trisect.records.parts import COMPONENTS, LINEARS, Factored, Linear
from trisect.records.shapes import LinearShape


class Place(NamedTuple):
    """Where maps are stored."""

    path: str  # of the module, inside the layer
    maps: tuple[str, ...]  # what it holds, in order: one map, or those fused there
    heads: int | None = None  # its maps lie by so many heads, each with its share of every map, not side by side


ROTATED = "rotated"  # the map that makes a query's rotated channels where those are apart (MLA): in no component
GATE = "output_gate"  # the map that makes the gate of what heads put out: it is narrowed with OV


@dataclass(frozen=True)
class LayerMaps:
    """What one decoder layer of any family has."""

    index: int
    layer: nn.Module
    family: Family
    config: Any  # of the text model

    @property
    def components(self) -> tuple[str, ...]:
        """The components that can be narrowed here; whatever else the layer has is left whole."""
        return tuple(name for name in COMPONENTS if self.why_whole(name) is None)

    def why_whole(self, component: str) -> str | None:
        """Why a component is not narrowed in this layer; None where it is."""
        if component == "mlp":
            there = self.experts is not None or self._find(self.family.down) is not None
            return None if there else "no MLP of plain matrices"
        module = self.attention_module
        if module is None:
            return "no attention"
        if component == "ov":
            return None if self.family.value_norm is None else "a norm of the values"
        if self.norms and self.family.norm_centred:
            return "a LayerNorm between projection and score"
        if self.family.lends_keys:
            lent = getattr(self.config, "num_kv_shared_layers", 0) and module.store_full_length_kv
            if module.is_kv_shared_layer or lent or getattr(module, self.family.qkv[2]) is None:
                return "keys that other layers read, or that are values, too"
        return None

    @property
    def why_no_decoder(self) -> str | None:
        """Why the Decoder's cache cannot hold what this layer remembers; None where it can."""
        if self.attention_module is None:
            return "no attention"
        if self.family.beside is not None:
            return "a state beside its attention"
        if getattr(self.config, "attention_chunk_size", None):
            return "attention in chunks of the text"
        return "keys that layers share" if self.family.lends_keys else None

    @property
    def norms(self) -> tuple[nn.Module, ...]:
        """The norms of queries and keys, if there are any."""
        return norms_of(self.attention_module, self.family)

    def _find(self, path: str | None) -> nn.Module | None:
        """A module of the layer, if it is there."""
        try:
            return None if path is None else self.layer.get_submodule(path)
        except AttributeError:
            return None

    @cached_property
    def experts(self) -> ExpertView | None:
        """The layer's mixture of experts; None where it has one MLP."""
        paths = self.family.experts
        return None if paths is None or self._find(paths.routed) is None else ExpertView(self.layer, paths)

    @property
    def mlp_output(self) -> nn.Module | None:
        """The module whose output is what the MLP adds to the residual stream."""
        return self._find(self.family.down) if self.experts is None else self.experts.block

    @property
    def mlp_beside(self) -> nn.Module | None:
        """The shared expert's output, where it is normalised apart from that of the routed ones."""
        shared = self.experts.shared if self.experts is not None and self.experts.paths.apart else None
        return None if shared is None else shared.down_proj

    @property
    def attention_module(self) -> Any:
        """The attention module as it is, stock or owned; None in a layer without."""
        return self._find(self.family.attention) if self._find(f"{self.family.attention}.{self.family.o}") else None

    @property
    def mixer(self) -> nn.Module | None:
        """What adds to the stream in front of the MLP: attention's output projection, or what stands for it."""
        attention = self.attention_module
        return self._find(self.family.mixer) if attention is None else getattr(attention, self.family.o)

    @property
    def beside(self) -> nn.Module | None:
        """What adds to the stream beside attention, reading what attention reads."""
        return None if self.family.beside is None else self._find(self.family.beside[0])

    @property
    def beside_scale(self) -> float:
        """What that is multiplied with."""
        return 1.0 if self.family.beside is None else float(getattr(self.layer, self.family.beside[1]))

    @property
    def attention(self) -> Attention:
        """The attention module, which must be an owned one."""
        module = self.attention_module
        assert isinstance(module, Attention), "a stock module; take view.own() or layer_views(own=True)"
        return module

    def own(self) -> Attention | None:
        """Put the owned forward in place of the stock one: for recording, rewriting and decoding."""
        module = self.attention_module
        return None if module is None else own(module, self.family, self.config)

    @property
    def heads(self) -> HeadLayout:
        """Sizes of the heads as they are; zeros in a layer without attention."""
        module = self.attention_module
        none = HeadLayout(heads=0, kv_heads=0, qk=0, vo=0)
        return none if module is None else layout_of(module, self.family, self.config)

    @property
    def pairs(self) -> int:
        """Rotation pairs of a query/key head that can be narrowed."""
        return self.heads.pairs if "qk" in self.components else 0

    @property
    def shared_output(self) -> bool:
        """One output projection for all heads."""
        return getattr(self.attention_module, "shared_output", False)

    def linears(self) -> tuple[str, ...]:
        """Names of the maps this layer has as modules; those of experts are none."""
        components = [name for name in self.components if name != "mlp" or self.experts is None]
        names = [name for component in components for name in LINEARS[component]]
        return tuple(name for name in names if name != "gate" or self.family.gate is not None)

    def linear(self, name: str) -> Linear:
        """One map by itself, channels in stored order."""
        W, b = self.dense(name)
        h = self.heads
        heads = {"q": h.heads, "k": h.kv_heads, "v": h.kv_heads, "o": 1 if self.shared_output else h.heads}
        return Linear(name=name, W=W, b=b, heads=heads.get(name, 1))

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of `linear(name).W`, (in, out); None before any backward pass."""
        gradient = weight_of(self._unfactored(name), gradient=True)
        return None if gradient is None else self.columns(name, gradient)

    def factored(self) -> tuple[LinearShape, ...]:
        """The maps that became two."""
        modules: dict[str, Any] = {name: self.module(name) for name in self.linears()}
        factored = {name: m for name, m in modules.items() if isinstance(m, FactoredLinear)}
        names = ("rank", "groups", "cached")
        return tuple(LinearShape(name=n, **{key: getattr(m, key) for key in names}) for n, m in factored.items())

    def module(self, name: str) -> nn.Module:
        """The module that computes a map: its own, or the one it is fused into."""
        module = self.layer.get_submodule(self._place(name).path)
        return module.get_submodule(name) if isinstance(module, SplitLinear) else module

    def projections(self) -> list[Any]:
        """The modules that hold the components' weights and nothing else; a factored map has two."""
        paths = dict.fromkeys(self._place(name).path for name in self.linears())
        inside = [module for path in paths for module in self.layer.get_submodule(path).modules()]
        if self.experts is not None:
            shared = () if self.experts.shared is None else self.experts.shared.children()
            inside += [self.experts.module, *shared]
        return [module for module in inside if matrices_of(module)]

    def dense(self, name: str) -> Dense:
        """Weight and bias of a map that is not factored."""
        module = self._unfactored(name)
        bias = bias_of(module)
        return self.columns(name, weight_of(module)), None if bias is None else self.columns(name, bias)

    def write_dense(self, new: Mapping[str, Dense]) -> None:
        """Replace weights and biases, of any width."""
        for name in new:
            self._unfactored(name)
        for path, names, heads in dict.fromkeys(map(self._place, new)):
            old = self.layer.get_submodule(path)
            if isinstance(old, SplitLinear):
                built = {name: built_from(self.module(name), *new[name]) for name in names if name in new}
                module: nn.Module = SplitLinear({**dict(old.named_children()), **built}, heads=heads)
            else:
                maps = [new[name] if name in new else self.dense(name) for name in names]
                weights, biases = [W for W, _ in maps], [b for _, b in maps if b is not None]
                if len(maps) > 1:
                    weights = [SplitLinear.joined(weights, heads)]
                    biases = [SplitLinear.joined(biases, heads)] if biases else []
                module = built_from(old, weights[0], biases[0] if biases else None)
            self.layer.set_submodule(path, module)

    def write_factored(self, solution: Factored) -> None:
        """Two modules in place of one map; maps it was fused with become modules of their own."""
        name, (d_in, inner), (groups, rank, width) = solution.name, solution.A.shape, solution.B.shape
        self.check_factors(LinearShape(name=name, rank=rank, groups=groups, cached=solution.cached))
        what = f"factors {tuple(solution.A.shape)} and {tuple(solution.B.shape)}"
        self.check_fits(name, (d_in, groups * width) if inner == groups * rank else (), solution.b, what)
        path, names, heads = self._place(name)
        module: nn.Module = FactoredLinear.of(self.module(name), solution)
        if len(names) > 1:
            old = self.layer.get_submodule(path)
            others = dict(old.named_children())
            if not isinstance(old, SplitLinear):  # copies, because columns would keep all of the matrix in memory
                copies: Any = {each: [x if x is None else x.clone() for x in self.dense(each)] for each in names}
                others = {each: built_from(old, *dense, plain=True) for each, dense in copies.items()}
            module = SplitLinear({**others, name: module}, heads=heads)
        self.layer.set_submodule(path, module)

    def check_fits(self, name: str, shape: tuple[int, ...], bias: Tensor | None, what: str) -> None:
        """Refuse what has not a map's shape, or a bias where that has none."""
        W, b = self.dense(name)
        if shape != W.shape or (bias is None) != (b is None):
            has, brings = ("without bias" if x is None else "with bias" for x in (b, bias))
            there = f"Layer {self.index}: {name} is a {tuple(W.shape)} map {has}"
            raise TrisectError(f"{there}; {what} {brings} cannot take its place.")

    def check_factors(self, linear: LinearShape) -> None:
        """Refuse factors that a map of this layer cannot have."""
        W, _ = self.dense(linear.name)
        d_in, d_out = W.shape
        if linear.cached and linear.name not in ("k", "v"):
            raise TrisectError(f"Layer {self.index}: {linear.name} is never cached; only k and v are.")
        if linear.groups < 1 or d_out % linear.groups or not 1 <= linear.rank <= min(d_in, d_out // linear.groups):
            there = f"Layer {self.index}: {linear.name} maps {d_in} channels to {d_out}"
            raise TrisectError(f"{there}; it cannot have {linear.groups} groups of rank {linear.rank}.")

    def _places(self) -> list[Place]:
        """Where this family has its maps."""
        f, a, h = self.family, self.family.attention, self.heads
        if f.latent:
            query = latent_query(self.attention_module, f.latent)
            heads = [Place(f"{a}.{query}", ("q", ROTATED), h.heads), Place(f"{a}.{f.latent.kv}", ("k", "v"), h.heads)]
        elif f.output_gate:
            q, k, v = (f"{a}.{path}" for path in f.qkv)
            heads = [Place(q, ("q", GATE), h.heads), Place(k, ("k",)), Place(v, ("v",))]
        elif len(f.qkv) == 1:
            heads = [Place(f"{a}.{f.qkv[0]}", QKV, h.kv_heads if f.per_head else None)]
        else:
            heads = [Place(f"{a}.{path}", (name,)) for name, path in zip(QKV, f.qkv, strict=True)]
        gate = [] if f.gate is None else [Place(f.gate, ("gate",))]
        inner = [Place(f.up, ("gate", "up"))] if f.gate == f.up else [*gate, Place(f.up, ("up",))]
        return [*heads, Place(f"{a}.{f.o}", ("o",)), *inner, Place(f.down, ("down",))]

    def _place(self, name: str) -> Place:
        for place in self._places():
            if name in place.maps:
                return place
        raise unknown_name("linear map", name, self.linears())

    def _unfactored(self, name: str) -> Any:
        module = self.module(name)
        if isinstance(module, FactoredLinear):
            raise TrisectError(f"Layer {self.index}: {name} is already factored; compress the original model.")
        return module

    def columns(self, name: str, x: Tensor) -> Tensor:
        """The map's own columns of (..., out) of the module that computes it."""
        path, names, heads = self._place(name)
        if len(names) == 1 or isinstance(self.layer.get_submodule(path), SplitLinear):
            return x
        if "up" in names:
            return x.chunk(len(names), dim=-1)[names.index(name)]
        h = self.heads
        widths = {"q": h.heads * h.qk, "k": h.kv_heads * h.qk, "v": h.kv_heads * h.vo}
        widths |= {ROTATED: h.heads * h.rotated, GATE: h.heads * h.vo}
        lots = heads or 1
        columns = x.unflatten(-1, (lots, -1)).split([widths[n] // lots for n in names], dim=-1)
        return columns[names.index(name)].flatten(-2)
