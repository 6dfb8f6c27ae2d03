"""A decoder layer seen as its parts: read them, write narrower ones back.

This is the only place that knows how a checkpoint stores what the methods think about.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trisect.errors import TrisectError
from trisect.models.attention import Attention, own
from trisect.models.blank import blank_mlp, blank_ov, blank_qk
from trisect.models.families import Family, family_for
from trisect.models.linear import bias_of, built_from, weight_of
from trisect.models.norm import HeadNorm, eps_of
from trisect.models.rotary import from_canonical, to_canonical
from trisect.parts import MLP, OV, QK, Part
from trisect.shapes import LayerShape, ModelShape

log = logging.getLogger(__name__)

# h = query heads, k = key/value heads, D = d_model, d = head width, I = MLP width, P = rotation pairs


@dataclass(frozen=True)
class LayerView:
    """One decoder layer of any family."""

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

    def shape(self) -> LayerShape:
        """Sizes as they are now."""
        a, f = self.attention, self.family
        first, last = (getattr(a, f.qkv[0]), getattr(a, f.qkv[-1]))
        inter, d_model = weight_of(self.down).shape
        return LayerShape(
            d_model=d_model,
            heads=a.heads,
            kv_heads=a.kv_heads,
            qk=a.qk_width,
            pairs=a.num_pairs,
            vo=a.vo_width,
            mlp=inter,
            gated=f.gate is not None,
            qk_bias=bias_of(first) is not None,
            v_bias=bias_of(last) is not None,
            o_bias=bias_of(getattr(a, f.o)) is not None,
            up_bias=bias_of(self.layer.get_submodule(f.up)) is not None,
            down_bias=bias_of(self.down) is not None,
            qk_norm=f.norms is not None,
            shared_output=a.shared_output,
        )

    def part(self, component: str) -> Part:
        """The component's tensors in canonical layout, checked to be finite."""
        readers: dict[str, Callable[[], Part]] = {"qk": self._qk, "ov": self._ov, "mlp": self._mlp}
        part = readers[component]()
        for name, tensor in vars(part).items():
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.isfinite().all():
                raise TrisectError(
                    f"Layer {self.index}: {name} of {component} holds NaN or inf; the checkpoint is damaged "
                    "or was saved from a run that diverged. Nothing was written."
                )
        return part

    def write(self, part: Part) -> None:
        """Replace a component's weights; widths follow from the part."""
        if isinstance(part, QK):
            self._write_qk(part)
        elif isinstance(part, OV):
            self._write_ov(part)
        else:
            self._write_mlp(part)

    def resize(self, shape: LayerShape) -> None:
        """Make room for weights of another shape, values to be loaded afterwards."""
        now, o = self.shape(), getattr(self.attention, self.family.o)
        with torch.device(o.weight.device):
            if (shape.qk, shape.pairs) != (now.qk, now.pairs):
                self.write(blank_qk(shape))
            if (shape.vo, shape.shared_output) != (now.vo, now.shared_output):
                self.write(blank_ov(shape))
            if shape.mlp != now.mlp:
                self.write(blank_mlp(shape))

    def projections(self) -> list[nn.Module]:
        """The linear modules that hold the three components."""
        a, f = self.attention, self.family
        inside = [getattr(a, name) for name in (*f.qkv, f.o)]
        paths = dict.fromkeys(path for path in (f.gate, f.up, f.down) if path is not None)
        return inside + [self.layer.get_submodule(path) for path in paths]

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Whatever is written to the layer inside is taken back at the end."""
        a = self.attention
        paths = [path for path in (self.family.gate, self.family.up, self.family.down) if path is not None]
        before = {path: self.layer.get_submodule(path) for path in paths}
        state = dict(vars(a))
        held = {name: dict(state[name]) for name in ("_modules", "_buffers", "_parameters")}
        try:
            yield
        finally:
            vars(a).clear()
            vars(a).update({**state, **held})
            for path, module in before.items():
                self.layer.set_submodule(path, module)

    # -- reading ---------------------------------------------------------------------------------------

    def _projections(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """W_q (h, D, d), W_k and W_v (k, D, d), biases (heads, d), in stored channel order."""
        a = self.attention
        modules = [getattr(a, name) for name in self.family.qkv]
        weights = [W.movedim(-2, 0) for W in a.layout.split([weight_of(m) for m in modules])]
        biases = [b for b in map(bias_of, modules) if b is not None]
        return weights, list(a.layout.split(biases)) if biases else [None] * 3

    def _qk(self) -> QK:
        a = self.attention
        (W_q, W_k, _), (b_q, b_k, _) = self._projections()
        norms = self._norm_weights()
        return QK(
            W_q=self._canonical(W_q),
            W_k=self._canonical(W_k),
            b_q=None if b_q is None else self._canonical(b_q),
            b_k=None if b_k is None else self._canonical(b_k),
            frequencies=self._frequencies(),
            norm_q=None if norms is None else self._canonical(norms[0].expand(a.heads, -1)),
            norm_k=None if norms is None else self._canonical(norms[1].expand(a.kv_heads, -1)),
        )

    def _ov(self) -> OV:
        a = self.attention
        (_, _, W_v), (_, _, b_v) = self._projections()
        o = getattr(a, self.family.o)
        W_o = weight_of(o).unflatten(0, (1 if a.shared_output else a.heads, -1))
        return OV(W_v=W_v, W_o=W_o, b_v=b_v, b_o=bias_of(o), heads=a.heads)

    def _mlp(self) -> MLP:
        f = self.family
        up, down = self.layer.get_submodule(f.up), self.down
        W_up, b_up = weight_of(up), bias_of(up)
        W_gate = b_gate = None
        if f.gate == f.up:
            W_gate, W_up = W_up.chunk(2, dim=1)
            b_gate, b_up = (None, None) if b_up is None else b_up.chunk(2)
        elif f.gate is not None:
            gate = self.layer.get_submodule(f.gate)
            W_gate, b_gate = weight_of(gate), bias_of(gate)
        return MLP(
            W_up=W_up,
            W_gate=W_gate,
            W_down=weight_of(down),
            b_up=b_up,
            b_gate=b_gate,
            b_down=bias_of(down),
        )

    def _frequencies(self) -> Tensor:
        a = self.attention
        if a.rotary_index is not None:
            return a.rotary_index.long()
        device = getattr(a, self.family.o).weight.device
        return torch.arange(a.num_pairs, device=device).expand(a.kv_heads, -1)

    def _norm_weights(self) -> tuple[Tensor, Tensor] | None:
        if self.family.norms is None:
            return None
        q_norm, k_norm = (getattr(self.attention, name) for name in self.family.norms)
        return q_norm.weight.detach(), k_norm.weight.detach()

    def _canonical(self, x: Tensor) -> Tensor:
        return to_canonical(x, self.attention.num_pairs, self.family.rotary)

    # -- writing ---------------------------------------------------------------------------------------

    def _write_qk(self, part: QK) -> None:
        a, f = self.attention, self.family
        weights, biases = self._projections()
        W_q, W_k = (from_canonical(x, part.num_pairs, f.rotary) for x in (part.W_q, part.W_k))
        b_q, b_k = (
            None if x is None else from_canonical(x, part.num_pairs, f.rotary) for x in (part.b_q, part.b_k)
        )
        narrowed = (part.width, part.num_pairs) != (
            a.qk_width,
            a.num_pairs,
        ) or a.rotary_index is not None
        a.qk_width, a.num_pairs = part.width, part.num_pairs
        self._write_projections([W_q, W_k, weights[2]], [b_q, b_k, biases[2]])
        if not narrowed:
            return
        if 2 * part.num_pairs != part.width and a.clips_qk is not None:
            self._drop_clamp("queries and keys", a.clips_qk)
            a.clips_qk = None
        a.rotary_index = part.frequencies.to(torch.int16) if part.num_pairs else None
        if f.norms is not None:
            self._write_norms(part)

    def _drop_clamp(self, what: str, bound: float) -> None:
        """Clamping commutes with keeping channels, not with mixing them: say once that it is gone."""
        if self.index == 0:
            log.warning("narrowed %s are no longer clamped to %g: their channels are mixed now", what, bound)

    def _write_norms(self, part: QK) -> None:
        assert self.family.norms is not None
        for name, weight in zip(self.family.norms, (part.norm_q, part.norm_k), strict=True):
            assert weight is not None
            old = getattr(self.attention, name)
            new = HeadNorm(weight.shape[0], weight.shape[1], eps=eps_of(old))
            stored = from_canonical(weight, part.num_pairs, self.family.rotary)
            new.weight = nn.Parameter(stored.contiguous(), requires_grad=old.weight.requires_grad)
            setattr(self.attention, name, new)

    def _write_ov(self, part: OV) -> None:
        a, f = self.attention, self.family
        weights, biases = self._projections()
        if part.width != a.vo_width and a.clips_v is not None:
            self._drop_clamp("values", a.clips_v)
            a.clips_v = None
        a.vo_width, a.shared_output = part.width, part.W_o.shape[0] != a.heads
        self._write_projections([*weights[:2], part.W_v], [*biases[:2], part.b_v])
        setattr(a, f.o, built_from(getattr(a, f.o), part.W_o.flatten(0, 1), part.b_o))

    def _write_projections(self, weights: list[Tensor], biases: list[Tensor | None]) -> None:
        a, f = self.attention, self.family
        fused = len(f.qkv) == 1
        columns = a.layout.join(*(W.movedim(0, -2) for W in weights), fused=fused)
        rows: list[Tensor | None] = [None] * len(columns)
        if biases[0] is not None:
            rows[:] = a.layout.join(*(b for b in biases if b is not None), fused=fused)
        for name, weight, bias in zip(f.qkv, columns, rows, strict=True):
            setattr(a, name, built_from(getattr(a, name), weight, bias))

    def _write_mlp(self, part: MLP) -> None:
        f = self.family
        W_up, b_up = part.W_up, part.b_up
        if f.gate == f.up:
            assert part.W_gate is not None
            W_up = torch.cat([part.W_gate, W_up], dim=1)
            if part.b_gate is not None and b_up is not None:
                b_up = torch.cat([part.b_gate, b_up])
        elif f.gate is not None:
            assert part.W_gate is not None
            self._replace(f.gate, part.W_gate, part.b_gate)
        self._replace(f.up, W_up, b_up)
        self._replace(f.down, part.W_down, part.b_down)

    def _replace(self, path: str, weight: Tensor, bias: Tensor | None) -> None:
        old = self.layer.get_submodule(path)
        self.layer.set_submodule(path, built_from(old, weight, bias))


def layer_views(model: nn.Module) -> list[LayerView]:
    """Views of all decoder layers; their attention modules become owned ones on the way."""
    config: Any = model.config
    family = family_for(config)
    text = config.get_text_config()
    views = []
    for index, layer in enumerate(model.get_submodule(family.layers).children()):
        own(layer.get_submodule(family.attention), family, text)
        views.append(LayerView(index, layer, family))
    return views


def shape_of(model: nn.Module) -> ModelShape:
    """Sizes of the model as it stands."""
    views = layer_views(model)
    shapes = tuple(view.shape() for view in views)
    parameters = list(model.parameters())
    inside = [p for view in views for module in view.projections() for p in module.parameters()]
    return ModelShape(
        layers=shapes,
        other_parameters=sum(p.numel() for p in parameters) - sum(p.numel() for p in inside),
        bytes_per_element=next(p for p in parameters if p.is_floating_point()).element_size(),
    )


__all__ = ["LayerView", "layer_views", "shape_of"]
