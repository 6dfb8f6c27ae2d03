"""A decoder layer seen as its parts: read them, write solutions back.

How a checkpoint stores what the methods think about is known here, in maps.py (single linear maps) and in
components.py (the three components), and nowhere else.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trisect.errors import TrisectError
from trisect.models.attention import own
from trisect.models.components import (
    blank_factored,
    blank_mlp,
    blank_ov,
    blank_qk,
    read_mlp,
    read_ov,
    read_qk,
    write_mlp,
    write_ov,
    write_qk,
)
from trisect.models.families import family_for
from trisect.models.linear import bias_of, sizes_of
from trisect.models.maps import LayerMaps
from trisect.records.parts import COMPONENTS, OV, QK, Factored, Linear, Masked, Part, Solution
from trisect.records.shapes import LayerShape, ModelShape


class LayerView(LayerMaps):
    """One decoder layer of any family."""

    def shape(self) -> LayerShape:
        """Sizes as they are now."""
        a, f = self.attention, self.family
        inter, d_model = sizes_of(self.down)
        biased = {name for name in self.linears() if bias_of(self.module(name)) is not None}
        return LayerShape(
            d_model=d_model,
            heads=a.heads,
            kv_heads=a.kv_heads,
            qk=a.qk_width,
            pairs=a.num_pairs,
            vo=a.vo_width,
            mlp=inter,
            gated=f.gate is not None,
            qk_bias="q" in biased,
            v_bias="v" in biased,
            o_bias="o" in biased,
            up_bias="up" in biased,
            down_bias="down" in biased,
            qk_norm=f.norms is not None,
            shared_output=a.shared_output,
            folded=a.rotary_rates is not None,
            linears=self.factored(),
        )

    def part(self, name: str) -> Part:
        """A component in canonical layout, or a single linear map; checked to be finite."""
        readers: dict[str, Callable[[LayerMaps], Part]] = {"qk": read_qk, "ov": read_ov, "mlp": read_mlp}
        part = readers[name](self) if name in COMPONENTS else self.linear(name)
        for field, tensor in vars(part).items():
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.isfinite().all():
                raise TrisectError(
                    f"Layer {self.index}: {field} of {name} holds NaN or inf; the checkpoint is damaged "
                    "or was saved from a run that diverged. Nothing was written."
                )
        return part

    def apply(self, solution: Solution) -> None:
        """Carry a solution out, whatever kind it is."""
        if isinstance(solution, Factored):
            self.write_factored(solution)
        elif isinstance(solution, Masked):
            self.write(replace(self.linear(solution.name), W=solution.W))
        else:
            self.write(solution.part)

    def write(self, part: Part) -> None:
        """Replace the weights of a component, whose widths follow from the part, or of a linear map."""
        if isinstance(part, QK):
            write_qk(self, part)
        elif isinstance(part, OV):
            write_ov(self, part)
        elif isinstance(part, Linear):
            self.write_linear(part)
        else:
            write_mlp(self, part)

    def resize(self, shape: LayerShape) -> None:
        """Make room for weights of another shape, values to be loaded afterwards."""
        now = self.shape()
        with torch.device(next(self.attention.parameters()).device):
            if (shape.qk, shape.pairs, shape.folded) != (now.qk, now.pairs, now.folded):
                self.write(blank_qk(shape))
            if (shape.vo, shape.shared_output) != (now.vo, now.shared_output):
                self.write(blank_ov(shape))
            if shape.mlp != now.mlp:
                self.write(blank_mlp(shape))
            for linear in shape.linears:
                if linear not in now.linears:
                    self.check_factors(linear)
                    self.apply(blank_factored(linear, self.linear(linear.name)))

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


def zeros_of(model: nn.Module) -> int:
    """Weights of the decoder's linear maps that are zero; biases do not count."""
    modules: list[Any] = [module for view in layer_views(model) for module in view.projections()]
    return sum(int((module.weight == 0).sum()) for module in modules)


__all__ = ["LayerView", "layer_views", "shape_of", "zeros_of"]
