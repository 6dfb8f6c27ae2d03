"""A decoder layer seen as its parts: read them in canonical layout, write solutions back.

How a checkpoint stores what the methods think about is known here and nowhere else: q, k, v, o, gate, up and
down are modules in one family and columns of a fused matrix in another. Looking changes nothing. Writing owns
the attention module and replaces modules, so that whoever holds the old ones can put them back.

h = query heads, k = key/value heads, D = d_model, d = head width, I = MLP width, P = rotation pairs
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from trisect.errors import TrisectError, unknown_name
from trisect.models.attention import Attention, layout_of, norms_of, own
from trisect.models.families import Family, family_for
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
    refuse_nan,
    sizes_of,
    weight_of,
)
from trisect.models.rotary import (
    HeadNorm,
    eps_of,
    from_canonical,
    loaded_rates,
    norm_weights,
    stored_rates,
    to_canonical,
)
from trisect.models.units import in_units
from trisect.records.parts import COMPONENTS, LINEARS, MLP, OV, QK, Factored, Linear, Masked, Part, Solution
from trisect.records.shapes import LayerShape, LinearShape

log = logging.getLogger(__name__)

Dense = tuple[Tensor, Tensor | None]
"""Weight (in, out) and bias (out,) of one map, heads side by side in stored channel order."""


Place = tuple[str, tuple[str, ...]]
"""Path of a module inside the layer, and the maps it holds in order: one, or those fused there."""


@dataclass(frozen=True)
class LayerView:
    """One decoder layer of any family: its parts, and the linear maps they are made of."""

    index: int
    layer: nn.Module
    family: Family
    config: Any
    """Of the text model."""

    @property
    def attention_module(self) -> Any:
        """The attention module as it is, stock or owned."""
        return self.layer.get_submodule(self.family.attention)

    @property
    def attention(self) -> Attention:
        """The attention module, which must be an owned one."""
        module = self.attention_module
        assert isinstance(module, Attention), "a stock module; take view.own() or layer_views(own=True)"
        return module

    def own(self) -> Attention:
        """Put the owned forward in place of the stock one: for recording, rewriting and decoding."""
        return own(self.attention_module, self.family, self.config)

    @property
    def heads(self) -> HeadLayout:
        """Sizes of the heads as they are."""
        return layout_of(self.attention_module, self.family, self.config)

    @property
    def norms(self) -> tuple[nn.Module, ...]:
        """The norms of queries and keys, if there are any."""
        return norms_of(self.attention_module, self.family)

    @property
    def fixed(self) -> dict[str, str]:
        """Components that keep their width, and why."""
        if not self.norms or (2 * self.heads.pairs == self.heads.qk and not self.family.norm_centred):
            return {}
        kind = "LayerNorm" if self.family.norm_centred else "norm over channels that do not all rotate"
        return {"qk": f"a {kind} stands between projection and score, and narrow heads have no such form of it"}

    @property
    def shared_output(self) -> bool:
        """One output projection for all heads."""
        return getattr(self.attention_module, "shared_output", False)

    @property
    def down(self) -> nn.Module:
        return self.layer.get_submodule(self.family.down)

    def shape(self) -> LayerShape:
        """Sizes as they are now."""
        inter, d_model = sizes_of(self.down)
        sizes = {name: getattr(self.heads, name) for name in ("heads", "kv_heads", "qk", "pairs", "vo")}
        biased = {name: bias_of(self.module(name)) is not None for name in self.linears()}
        return LayerShape(
            d_model=d_model,
            mlp=inter,
            **sizes,
            gated=self.family.gate is not None,
            qk_bias=biased["q"],
            **{f"{name}_bias": biased[name] for name in ("v", "o", "up", "down")},
            qk_norm=bool(self.norms),
            norm_together=self.family.norm_over == "heads",
            fixed=tuple(self.fixed),
            shared_output=self.shared_output,
            folded=getattr(self.attention_module, "rotary_rates", None) is not None,
            linears=self.factored(),
        )

    def part(self, name: str) -> Part:
        """A component in canonical layout, or a single linear map; checked to be finite."""
        read: Callable[[], Part] | None = getattr(self, f"read_{name}") if name in COMPONENTS else None
        part = in_units(self.linear(name) if read is None else read(), self.layer, self.family)
        for field, tensor in vars(part).items():
            if isinstance(tensor, Tensor):
                refuse_nan(tensor, f"Layer {self.index}: {field} of {name}")
        return part

    def read_qk(self) -> QK:
        """Queries and keys, rotation pairs in canonical order."""
        heads, module = self.heads, self.attention_module
        rates = getattr(module, "rotary_rates", None)
        (W_q, b_q), (W_k, b_k) = _heads(self.dense("q"), heads.heads), _heads(self.dense("k"), heads.kv_heads)
        weights: list[Any] = [
            norm_weights(norm, heads=count, width=heads.qk, offset=self.family.norm_offset)
            for norm, count in zip(self.norms, (heads.heads, heads.kv_heads), strict=False)
        ]
        norm_q, norm_k = weights or (None, None)

        def canonical(x: Any) -> Any:
            return None if x is None else to_canonical(x, heads.pairs, self.family.rotary)

        return QK(
            W_q=canonical(W_q),
            W_k=canonical(W_k),
            b_q=canonical(b_q),
            b_k=canonical(b_k),
            frequencies=self._frequencies(),
            norm_q=canonical(norm_q),
            norm_k=canonical(norm_k),
            rates=None if rates is None else loaded_rates(rates).double(),
        )

    def read_ov(self) -> OV:
        """Values and outputs, head by head."""
        heads = self.heads
        W_v, b_v = _heads(self.dense("v"), heads.kv_heads)
        W_o, b_o = self.dense("o")
        W_o = W_o.unflatten(0, (1 if self.shared_output else heads.heads, -1))
        return OV(W_v=W_v, W_o=W_o, b_v=b_v, b_o=b_o, heads=heads.heads)

    def read_mlp(self) -> MLP:
        (W_up, b_up), (W_down, b_down) = self.dense("up"), self.dense("down")
        W_gate, b_gate = self.dense("gate") if "gate" in self.linears() else (None, None)
        return MLP(W_up=W_up, W_gate=W_gate, W_down=W_down, b_up=b_up, b_gate=b_gate, b_down=b_down)

    def apply(self, solution: Solution) -> None:
        """Carry a solution out, whatever kind it is."""
        if isinstance(solution, Factored):
            self.own()
            self.write_factored(solution)
        elif isinstance(solution, Masked):
            self.write(replace(self.linear(solution.name), W=solution.W))
        else:
            self.write(solution.part)

    def write(self, part: Part) -> None:
        """Replace the weights of a component, whose widths follow from the part, or of a linear map."""
        self.own()
        part = in_units(part, self.layer, self.family, inverse=True)
        if isinstance(part, QK):
            self._write_qk(part)
        elif isinstance(part, OV):
            self._write_ov(part)
        elif isinstance(part, Linear):
            self.write_linear(part)
        else:
            maps: dict[str, Dense] = {"up": (part.W_up, part.b_up), "down": (part.W_down, part.b_down)}
            self.write_dense(maps if part.W_gate is None else {**maps, "gate": (part.W_gate, part.b_gate)})

    def resize(self, shape: LayerShape) -> None:
        """Make room for weights of another shape, values to be loaded afterwards."""
        now = self.shape()
        with torch.device(next(self.own().parameters()).device):
            if (shape.qk, shape.pairs, shape.folded) != (now.qk, now.pairs, now.folded):
                self.write(self._blank_qk(shape))
            if (shape.vo, shape.shared_output) != (now.vo, now.shared_output):
                ov = self.read_ov()
                W_o = torch.empty(1 if shape.shared_output else shape.heads, shape.vo, shape.d_model)
                W_v, b_v = _resized(ov.W_v, shape.vo), _resized(ov.b_v, shape.vo)
                self.write(replace(ov, W_v=W_v, b_v=b_v, W_o=W_o))
            if shape.mlp != now.mlp:
                mlp = self.read_mlp()
                wide = ("W_up", "W_gate", "b_up", "b_gate")
                changes = {name: _resized(getattr(mlp, name), shape.mlp) for name in wide}
                self.write(replace(mlp, **changes, W_down=_resized(mlp.W_down, shape.mlp, dim=0)))
            for linear in shape.linears:
                if linear not in now.linears:
                    self.check_factors(linear)
                    self.write_factored(self._blank_factors(linear))

    def _blank_qk(self, shape: LayerShape) -> QK:
        qk, pairs = self.read_qk(), (shape.kv_heads, shape.pairs)
        wide = ("W_q", "W_k", "b_q", "b_k", "norm_q", "norm_k")
        return replace(
            qk,
            **{name: _resized(getattr(qk, name), shape.qk) for name in wide},
            frequencies=torch.empty(pairs, dtype=torch.int64),
            rates=torch.empty(pairs) if shape.folded else None,
        )

    def _blank_factors(self, linear: LinearShape) -> Factored:
        whole, groups, rank = self.linear(linear.name), linear.groups, linear.rank
        d_in, d_out = whole.W.shape
        A, B = torch.empty(d_in, groups * rank), torch.empty(groups, rank, d_out // groups)
        return Factored(name=linear.name, A=A, B=B, b=whole.b, cached=linear.cached, loss=0.0, total=0.0)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Whatever is written to the layer inside is taken back at the end."""
        attention = self.attention_module
        paths = [path for path in (self.family.gate, self.family.up, self.family.down) if path is not None]
        before = {path: self.layer.get_submodule(path) for path in paths}
        kind, state = type(attention), dict(vars(attention))
        held = {name: dict(state[name]) for name in ("_modules", "_buffers", "_parameters")}
        try:
            yield
        finally:
            attention.__class__ = kind
            vars(attention).clear()
            vars(attention).update({**state, **held})
            for path, module in before.items():
                self.layer.set_submodule(path, module)

    def _write_qk(self, part: QK) -> None:
        """Queries and keys, with the frequencies and norms that narrow heads need."""
        a, rotary = self.attention, self.family.rotary
        W_q, W_k = (from_canonical(x, part.num_pairs, rotary) for x in (part.W_q, part.W_k))
        b_q, b_k = (None if b is None else from_canonical(b, part.num_pairs, rotary) for b in (part.b_q, part.b_k))
        narrowed = (part.width, part.num_pairs) != (a.layout.qk, a.num_pairs)
        narrowed = narrowed or part.rates is not None or a.rotary_index is not None
        if narrowed and "qk" in self.fixed:
            raise TrisectError(f"Layer {self.index}: QK keeps its width, because {self.fixed['qk']}.")
        layout = replace(a.layout, qk=part.width, pairs=part.num_pairs)
        self.write_dense({"q": _flat(W_q, b_q), "k": _flat(W_k, b_k)}, layout=layout)
        a.layout = layout
        if not narrowed:
            return
        if (2 * part.num_pairs != part.width or part.rates is not None) and a.clips_qk is not None:
            self._drop_clamp("queries and keys", a.clips_qk)
            a.clips_qk = None
        a.rotary_index = part.frequencies.to(torch.int16) if part.num_pairs else None
        a.rotary_rates = None if part.rates is None else stored_rates(part.rates)
        together = self.family.norm_over == "heads"
        names = (self.family.norms or ()) if self.norms else ()
        for name, weight in zip(names, (part.norm_q, part.norm_k), strict=False):
            assert weight is not None
            old = getattr(a, name)
            new = HeadNorm(weight.shape[0], weight.shape[1], eps=eps_of(old), together=together)
            stored = from_canonical(weight, part.num_pairs, rotary).to(old.weight.dtype).contiguous()
            new.weight = nn.Parameter(stored, requires_grad=old.weight.requires_grad)
            setattr(a, name, new)

    def _write_ov(self, part: OV) -> None:
        a = self.attention
        if part.width != a.layout.vo and a.clips_v is not None:
            self._drop_clamp("values", a.clips_v)
            a.clips_v = None
        maps = {"v": _flat(part.W_v, part.b_v), "o": (part.W_o.flatten(0, 1), part.b_o)}
        layout = replace(a.layout, vo=part.width)
        self.write_dense(maps, layout=layout)
        a.layout, a.shared_output = layout, part.W_o.shape[0] != layout.heads

    def _frequencies(self) -> Tensor:
        index = getattr(self.attention_module, "rotary_index", None)
        if index is not None:
            return index.long()
        device = next(self.attention_module.parameters()).device
        return torch.arange(self.heads.pairs, device=device).expand(self.heads.kv_heads, -1)

    def _drop_clamp(self, what: str, bound: float) -> None:
        """Clamping commutes with keeping channels, not with mixing them: say once that it is gone."""
        if self.index == 0:
            log.warning("narrowed %s are no longer clamped to %g: their channels are mixed now", what, bound)

    def linears(self) -> tuple[str, ...]:
        """Names of the maps this layer has."""
        names = [name for component in LINEARS.values() for name in component]
        return tuple(name for name in names if name != "gate" or self.family.gate is not None)

    def linear(self, name: str) -> Linear:
        """One map by itself, channels in stored order."""
        W, b = self.dense(name)
        h = self.heads
        heads = {"q": h.heads, "k": h.kv_heads, "v": h.kv_heads, "o": 1 if self.shared_output else h.heads}
        return Linear(name=name, W=W, b=b, heads=heads.get(name, 1))

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of `linear(name).W`, (in, out); None before any backward pass."""
        gradient = gradient_of(self._unfactored(name))
        return None if gradient is None else self._columns(name, gradient)

    def factored(self) -> tuple[LinearShape, ...]:
        """The maps that became two."""
        modules = {name: self.module(name) for name in self.linears()}
        return tuple(
            LinearShape(name=name, rank=m.rank, groups=m.groups, cached=m.cached)
            for name, m in modules.items()
            if isinstance(m, FactoredLinear)
        )

    def module(self, name: str) -> nn.Module:
        """The module that computes a map: its own, or the one it is fused into."""
        module = self.layer.get_submodule(self._place(name)[0])
        return module.get_submodule(name) if isinstance(module, SplitLinear) else module

    def projections(self) -> list[nn.Module]:
        """The modules whose `weight` belongs to a linear map; a factored map has two."""
        paths = dict.fromkeys(self._place(name)[0] for name in self.linears())
        inside = [module for path in paths for module in self.layer.get_submodule(path).modules()]
        return [module for module in inside if isinstance(getattr(module, "weight", None), Tensor)]

    def dense(self, name: str) -> Dense:
        """Weight and bias of a map that is not factored."""
        module = self._unfactored(name)
        bias = bias_of(module)
        return self._columns(name, weight_of(module)), None if bias is None else self._columns(name, bias)

    def write_dense(self, new: Mapping[str, Dense], *, layout: HeadLayout | None = None) -> None:
        """Replace weights and biases; `layout` says how heads lie afterwards, if not as before."""
        layout = layout or self.heads
        for name in new:
            self._unfactored(name)
        for path, names in dict.fromkeys(map(self._place, new)):
            old = self.layer.get_submodule(path)
            heads = layout if names == QKV else None
            if isinstance(old, SplitLinear):
                built = {name: built_from(self.module(name), *new[name]) for name in names if name in new}
                module: nn.Module = SplitLinear({**dict(old.named_children()), **built}, layout=heads)
            else:
                maps = [new[name] if name in new else self.dense(name) for name in names]
                module = built_from(old, *_joined(maps, heads))
            self.layer.set_submodule(path, module)

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
        self.check_factors(LinearShape(name=name, rank=solution.rank, groups=solution.groups, cached=solution.cached))
        W, b = self.dense(name)
        inner = solution.groups * solution.rank
        makes = solution.A.shape[0], solution.groups * solution.B.shape[2]
        if solution.A.shape[1] != inner or makes != W.shape or (solution.b is None) != (b is None):
            raise TrisectError(
                f"Layer {self.index}: {name} is a {tuple(W.shape)} map {_with_bias(b)}, but factors "
                f"{tuple(solution.A.shape)} and {tuple(solution.B.shape)} {_with_bias(solution.b)} are not."
            )
        path, names = self._place(name)
        module: nn.Module = factored_from(self.module(name), solution)
        if len(names) > 1:
            old = self.layer.get_submodule(path)
            others = dict(old.named_children()) if isinstance(old, SplitLinear) else self._split(old, names)
            module = SplitLinear({**others, name: module}, layout=self.heads if names == QKV else None)
        self.layer.set_submodule(path, module)

    def check_factors(self, linear: LinearShape) -> None:
        """Refuse factors that a map of this layer cannot have."""
        W, _ = self.dense(linear.name)
        d_in, d_out = W.shape
        if linear.cached and linear.name not in ("k", "v"):
            raise TrisectError(f"Layer {self.index}: {linear.name} is never cached; only k and v are.")
        fits = linear.groups >= 1 and d_out % linear.groups == 0
        if not fits or not 1 <= linear.rank <= min(d_in, d_out // linear.groups):
            raise TrisectError(
                f"Layer {self.index}: {linear.name} maps {d_in} channels to {d_out}; it cannot have "
                f"{linear.groups} groups of rank {linear.rank}."
            )

    def _split(self, old: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
        """The maps of a fused matrix as modules; copies, because columns would keep all of it in memory."""
        dense = {name: self.dense(name) for name in names}
        return {
            name: built_from(old, W.clone(), None if b is None else b.clone(), plain=True)
            for name, (W, b) in dense.items()
        }

    def _place(self, name: str) -> Place:
        f = self.family
        if name not in self.linears():
            raise unknown_name("linear map", name, self.linears())
        if name in QKV and len(f.qkv) == 1:
            return f"{f.attention}.{f.qkv[0]}", QKV
        if name in ("gate", "up") and f.gate == f.up:
            return f.up, ("gate", "up")
        if name in QKV:
            return f"{f.attention}.{f.qkv[QKV.index(name)]}", (name,)
        return f"{f.attention}.{f.o}" if name == "o" else getattr(f, name), (name,)

    def _unfactored(self, name: str) -> nn.Module:
        module = self.module(name)
        if isinstance(module, FactoredLinear):
            raise TrisectError(f"Layer {self.index}: {name} is already factored; compress the original model.")
        return module

    def _columns(self, name: str, x: Tensor) -> Tensor:
        """The map's own columns of (..., out) of the module that computes it."""
        path, names = self._place(name)
        if len(names) == 1 or isinstance(self.layer.get_submodule(path), SplitLinear):
            return x
        if names == QKV:
            return self.heads.split([x])[names.index(name)].flatten(-2)
        return x.chunk(len(names), dim=-1)[names.index(name)]


def layer_views(model: nn.Module, *, own: bool = False) -> list[LayerView]:
    """Views of all decoder layers; with `own`, their attention modules become owned ones on the way."""
    config: Any = model.config
    family, text = family_for(config), config.get_text_config()
    layers = model.get_submodule(family.layers).children()
    views = [LayerView(index, layer, family, text) for index, layer in enumerate(layers)]
    if own:
        for view in views:
            view.own()
    return views


def _heads(dense: Dense, heads: int) -> Dense:
    """Weight (D, h d) as (h, D, d), bias (h d,) as (h, d)."""
    W, b = dense
    return W.unflatten(-1, (heads, -1)).movedim(-2, 0), None if b is None else b.unflatten(-1, (heads, -1))


def _flat(W: Tensor, b: Tensor | None) -> Dense:
    """Undo `_heads`."""
    return W.movedim(0, -2).flatten(-2), None if b is None else b.flatten()


def _resized(x: Tensor | None, width: int, dim: int = -1) -> Any:
    """A tensor without values, with another width."""
    if x is None:
        return None
    shape = list(x.shape)
    shape[dim] = width
    return x.new_empty(shape)


def _with_bias(b: Tensor | None) -> str:
    return "without bias" if b is None else "with bias"


def _joined(maps: Sequence[Dense], layout: HeadLayout | None) -> Dense:
    """Maps of one input as the one matrix that holds them all."""
    if len(maps) == 1:
        return maps[0]
    biases = [b for _, b in maps if b is not None]
    return fused([W for W, _ in maps], layout), fused(biases, layout) if biases else None
