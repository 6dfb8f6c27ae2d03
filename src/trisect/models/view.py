"""A decoder layer seen as its parts: read them in canonical layout, write solutions back.

How a checkpoint stores what the methods think about is known here and in maps.py, and nowhere else. Looking
changes nothing. Writing owns the attention module and replaces modules.

h = query heads, k = key/value heads, D = d_model, d = head width, I = MLP width, P = rotation pairs
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from trisect.errors import TrisectError
from trisect.models.families import family_for
from trisect.models.heads import (
    HeadNorm,
    eps_of,
    from_canonical,
    in_units,
    loaded_rates,
    norm_weights,
    stored_rates,
    to_canonical,
)
from trisect.models.linear import Dense, as_maps, as_mlp, bias_of, matrices_of, refuse_nan, resized, sizes_of
from trisect.models.maps import GATE, LayerMaps
from trisect.records.parts import COMPONENTS, LINEARS, MLP, OV, QK, Experts, Factored, Linear, Masked, Part, Solution
from trisect.records.shapes import LayerShape, LinearShape

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerView(LayerMaps):
    """One decoder layer of any family: its parts, and the linear maps they are made of."""

    def shape(self) -> LayerShape:
        """Sizes as they are now."""
        sizes = {name: getattr(self.heads, name) for name in ("heads", "kv_heads", "qk", "pairs", "vo")}
        if self.family.latent is not None and self.attention_module is not None:
            sizes |= {"q_in": sizes_of(self.module("q"))[0], "kv_in": sizes_of(self.module("k"))[0]}
            sizes["rotated"] = self.heads.rotated
        biased = {name for name in self.linears() if bias_of(self.module(name)) is not None}
        inside = {id(weight) for module in self.projections() for weight in matrices_of(module)}
        others = [module for module in self.layer.modules() if not isinstance(module, HeadNorm)]
        whole = [p for module in others for p in module.parameters(recurse=False) if p.ndim > 1 and id(p) not in inside]
        return LayerShape(
            components=self.components,
            whole=sum(p.numel() for p in whole),
            d_model=self.config.hidden_size,
            **sizes,
            **self._mlp_sizes(biased),
            qk_bias="q" in biased,
            **{f"{name}_bias": name in biased for name in ("v", "o")},
            output_gate=self.family.output_gate,
            qk_norm=bool(self.norms),
            norm_together=self.family.norm_over == "heads",
            shared_output=self.shared_output,
            folded=getattr(self.attention_module, "rotary_rates", None) is not None,
            linears=self.factored(),
        )

    def _mlp_sizes(self, biased: set[str]) -> dict[str, Any]:
        """Fields of the shape that tell about the MLP, or about experts."""
        experts = self.experts
        if experts is None:
            width = sizes_of(self.module("down"))[0] if "mlp" in self.components else 0
            biases = {f"{name}_bias": name in biased for name in ("up", "down")}
            return {"mlp": width, "gated": self.family.gate is not None, **biases}
        return {
            "mlp": experts.width,
            "gated": experts.gated,
            "experts": experts.count,
            "dropped_experts": experts.dropped,
            "top_k": experts.top_k,
            "shared": 0 if experts.shared is None else experts.shared.down_proj.in_features // experts.width,
            "up_bias": experts.biased,
            "down_bias": experts.biased,
        }

    def part(self, name: str) -> Part:
        """A component in canonical layout, or a single linear map; checked to be finite."""
        self._check_there(name)
        read: Callable[[], Part] = getattr(self, f"read_{name}") if name in COMPONENTS else lambda: self.linear(name)
        part = in_units(read(), self.layer, self.family)
        for one in (*part.routed, part.shared) if isinstance(part, Experts) else (part,):
            for field, tensor in () if one is None else vars(one).items():
                if isinstance(tensor, Tensor):
                    refuse_nan(tensor, f"Layer {self.index}: {field} of {name}")
        return part

    def _check_there(self, name: str) -> None:
        if name in COMPONENTS and name not in self.components:
            raise TrisectError(f"Layer {self.index} has no {name} to narrow: {self.why_whole(name)}.")

    def read_qk(self) -> QK:
        """Queries and keys, rotation pairs in canonical order."""
        heads, module = self.heads, self.attention_module
        rates = getattr(module, "rotary_rates", None)
        (W_q, b_q), (W_k, b_k) = _heads(self.dense("q"), heads.heads), _heads(self.dense("k"), heads.kv_heads)
        found: dict[str, Any] = {"W_q": W_q, "W_k": W_k, "b_q": b_q, "b_k": b_k}
        for name, norm, count in zip(("norm_q", "norm_k"), self.norms, (heads.heads, heads.kv_heads), strict=False):
            found[name] = norm_weights(norm, heads=count, width=heads.qk, offset=self.family.norm_offset)
        pairs, rotary = heads.pairs, self.family.rotary
        canonical: Any = {k: None if x is None else to_canonical(x, pairs, rotary) for k, x in found.items()}
        index = getattr(module, "rotary_index", None)
        if index is None:  # all that there are
            index = torch.arange(pairs, device=W_q.device).expand(heads.kv_heads, -1)
        rates = None if rates is None else loaded_rates(rates).double()
        return QK(**canonical, frequencies=index.long(), rates=rates)

    def read_ov(self) -> OV:
        """Values and outputs, head by head."""
        heads = self.heads
        W_v, b_v = _heads(self.dense("v"), heads.kv_heads)
        W_o, b_o = self.dense("o")
        W_o = W_o.unflatten(0, (1 if self.shared_output else heads.heads, -1))
        W_g, b_g = _heads(self.dense(GATE), heads.heads) if self.family.output_gate else (None, None)
        return OV(W_v=W_v, W_o=W_o, b_v=b_v, b_o=b_o, W_g=W_g, b_g=b_g, heads=heads.heads)

    def read_mlp(self) -> MLP | Experts:
        """Up, gate and down; those of every expert where there are several."""
        if self.experts is not None:
            return self.experts.read()
        return as_mlp({name: self.dense(name) for name in LINEARS["mlp"] if name in self.linears()})

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
            self.check_fits(part.name, part.W.shape, part.b, f"a {tuple(part.W.shape)} one")
            self.write_dense({part.name: (part.W, part.b)})
        elif isinstance(part, Experts):
            assert self.experts is not None
            self.experts.write(part)
        else:
            self.write_dense(as_maps(part))

    def resize(self, shape: LayerShape) -> None:
        """Make room for weights of another shape, values to be loaded afterwards."""
        now = self.shape()
        self.own()
        for component in COMPONENTS:
            if shape.width(component) != now.width(component):
                self._check_there(component)
        # Outside, because vLLM has weights without memory but not buffers.
        blank = torch.empty(shape.kv_heads, shape.pairs)
        with torch.device(next(self.layer.parameters()).device):
            if (shape.qk, shape.pairs, shape.folded) != (now.qk, now.pairs, now.folded):
                qk = resized(self.read_qk(), shape.qk)
                self.write(replace(qk, frequencies=blank.long(), rates=blank if shape.folded else None))
            if (shape.vo, shape.shared_output) != (now.vo, now.shared_output):
                ov = resized(self.read_ov(), shape.vo)
                self.write(replace(ov, W_o=ov.W_o[:1] if shape.shared_output else ov.W_o))
            if (shape.mlp, shape.dropped_experts) != (now.mlp, now.dropped_experts):
                experts, dropped = self.experts, shape.dropped_experts
                several = None if experts is None else experts.blank(shape.mlp, dropped=dropped)
                self.write(several or resized(self.read_mlp(), shape.mlp))
            for linear in shape.linears:
                if linear not in now.linears:
                    self.check_factors(linear)
                    self.write_factored(self._blank_factors(linear))

    def _blank_factors(self, linear: LinearShape) -> Factored:
        whole, groups, rank = self.linear(linear.name), linear.groups, linear.rank
        d_in, d_out = whole.W.shape
        A, B = torch.empty(d_in, groups * rank), torch.empty(groups, rank, d_out // groups)
        return Factored(name=linear.name, A=A, B=B, b=whole.b, cached=linear.cached, loss=0.0, total=0.0)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Whatever is written to the layer inside is taken back at the end."""
        attention = self.attention_module
        before = {module: dict(module._modules) for module in self.layer.modules()}
        kind, state = type(attention), {} if attention is None else dict(vars(attention))
        held = {name: dict(state[name]) for name in ("_modules", "_buffers", "_parameters") if name in state}
        try:
            yield
        finally:
            if attention is not None:
                attention.__class__ = kind
                vars(attention).clear()
                vars(attention).update({**state, **held})
            for module, children in before.items():
                module._modules = children

    def _write_qk(self, part: QK) -> None:
        """Queries and keys, with the frequencies and norms that narrow heads need."""
        a, rotary = self.attention, self.family.rotary
        W_q, W_k = (from_canonical(x, part.num_pairs, rotary) for x in (part.W_q, part.W_k))
        b_q, b_k = (None if b is None else from_canonical(b, part.num_pairs, rotary) for b in (part.b_q, part.b_k))
        narrowed = (part.width, part.num_pairs) != (a.layout.qk, a.layout.pairs)
        narrowed = narrowed or part.rates is not None or a.rotary_index is not None
        self.write_dense({"q": _flat(W_q, b_q), "k": _flat(W_k, b_k)})
        a.layout = replace(a.layout, qk=part.width, pairs=part.num_pairs)
        if not narrowed:
            return
        if 2 * part.num_pairs != part.width or part.rates is not None:
            self._drop_clamp("clips_qk", "queries and keys")
        a.rotary_index = part.frequencies.to(torch.int16) if part.num_pairs else None
        a.rotary_rates = None if part.rates is None else stored_rates(part.rates)
        together, names = self.family.norm_over == "heads", (self.family.norms or ()) if self.norms else ()
        for name, weight in zip(names, (part.norm_q, part.norm_k), strict=False):
            assert weight is not None
            old = self.norms[names.index(name)]
            like = next(old.parameters(), part.W_q)  # a norm without weights gets some
            new = HeadNorm(weight.shape[0], weight.shape[1], eps=eps_of(old), together=together)
            stored = from_canonical(weight, part.num_pairs, rotary).to(like.device, like.dtype).contiguous()
            new.weight = nn.Parameter(stored, requires_grad=like.requires_grad)
            setattr(a, name, new)

    def _write_ov(self, part: OV) -> None:
        a = self.attention
        if part.width != a.layout.vo:
            self._drop_clamp("clips_v", "values")
        maps = {"v": _flat(part.W_v, part.b_v), "o": (part.W_o.flatten(0, 1), part.b_o)}
        if part.W_g is not None:
            maps[GATE] = _flat(part.W_g, part.b_g)
        self.write_dense(maps)
        a.layout, a.shared_output = replace(a.layout, vo=part.width), part.W_o.shape[0] != a.layout.heads

    def _drop_clamp(self, name: str, what: str) -> None:
        """Clamping commutes with keeping channels, not with mixing them: say once that it is gone."""
        bound = getattr(self.attention, name)
        if bound is not None and self.index == 0:
            log.warning("narrowed %s are no longer clamped to %g: their channels are mixed now", what, bound)
        setattr(self.attention, name, None)


def layer_views(model: nn.Module, *, own: bool = False) -> list[LayerView]:
    """Views of all decoder layers; with `own`, their attention modules become owned ones on the way."""
    # The model may be one without a language-model head.
    config: Any = model.config
    family, text = family_for(config), config.get_text_config()
    first, _, rest = family.layers.partition(".")
    layers = model.get_submodule(family.layers if hasattr(model, first) else rest).children()
    views = [LayerView(index, layer, family, text) for index, layer in enumerate(layers)]
    if own:
        for view in views:
            view.own()
    return views


def left_whole(views: Sequence[LayerView], parts: Sequence[str] = COMPONENTS) -> list[str]:
    """What cannot be narrowed, and why, e.g. "qk, ov of layers 0-2, 4-6: no attention"."""
    found: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for part in parts:
        reasons: dict[str, list[int]] = {}
        for view in views:
            reason = view.why_whole(part)
            if reason is not None:
                reasons.setdefault(reason, []).append(view.index)
        for reason, layers in reasons.items():
            found.setdefault((reason, tuple(layers)), []).append(part)
    return [f"{', '.join(names)} of {_ranges(layers)}: {reason}" for (reason, layers), names in found.items()]


def _ranges(numbers: Sequence[int]) -> str:
    """E.g. "layers 0-2, 5"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    spans = ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in zip(starts, ends, strict=True))
    return f"layer {spans}" if len(numbers) == 1 else f"layers {spans}"


def _heads(dense: Dense, heads: int) -> Dense:
    """Weight (D, h d) as (h, D, d), bias (h d,) as (h, d)."""
    W, b = dense
    return W.unflatten(-1, (heads, -1)).movedim(-2, 0), None if b is None else b.unflatten(-1, (heads, -1))


def _flat(W: Tensor, b: Tensor | None) -> Dense:
    """Undo `_heads`."""
    return W.movedim(0, -2).flatten(-2), None if b is None else b.flatten()
