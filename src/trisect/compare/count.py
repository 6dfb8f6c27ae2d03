"""Parameters counted from the modules that a model really has, and what an asked ratio should have taken."""

from dataclasses import dataclass
from typing import Any

from trisect.config import CompressConfig
from trisect.methods import get_method
from trisect.models import layer_views, zeros_of
from trisect.plan import budget_of
from trisect.plan.budget import linear_parameters, linears_of, matrix_parameters
from trisect.plan.problem import grid_of
from trisect.records.shapes import LayerShape, ModelShape


@dataclass(frozen=True, kw_only=True)
class Count:
    """What the decoder layers' linear modules hold; biases are left out, as in the paper's ratio."""

    weights: int
    zeros: int
    """Of these, weights that are exactly zero: what a mask takes without making anything smaller."""
    parameters: int
    """Of the whole model, embeddings included."""


def count(model: Any) -> Count:
    """Count a model as it stands."""
    modules = [module for view in layer_views(model) for module in view.projections()]
    return Count(
        weights=sum(p.numel() for module in modules for p in module.parameters() if p.ndim > 1),
        zeros=zeros_of(model),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def chosen_weights(shape: ModelShape, config: CompressConfig) -> int:
    """Weights of the dense model that the config lets its method take from."""
    solvers = get_method(config.method).solvers
    total = 0
    for layer in _chosen_layers(shape, config):
        for part in config.parts:
            names = [n for n in linears_of(layer, part) if part in solvers or n in solvers]
            total += sum(linear_parameters(layer, name) for name in names)
    return total


def ratio_of(config: CompressConfig) -> str:
    """What the asked ratio is a share of: weights, or KV bytes where method or budget are about those."""
    return (
        "KV"
        if getattr(get_method(config.method), "cached", False) or config.goal.budget == "kv"
        else "weights"
    )


def removed_cache(before: ModelShape, after: ModelShape, config: CompressConfig) -> float:
    """The share of the chosen components' KV cache that is gone."""
    was = sum(
        layer.kv_heads * (layer.qk * ("qk" in config.parts) + layer.vo * ("ov" in config.parts))
        for layer in _chosen_layers(before, config)
    )
    gone = budget_of(before).kv_bytes_per_token - budget_of(after).kv_bytes_per_token
    return gone / (was * before.bytes_per_element)


def alignment_step(shape: ModelShape, config: CompressConfig) -> float:
    """The share of the chosen components that one step of the alignment grid is."""
    step = whole = 0.0
    for layer in _chosen_layers(shape, config):
        for part in config.parts:
            weights = matrix_parameters(layer, part)
            whole += weights
            step += weights * grid_of(layer, part, align=config.align).step / layer.width(part)
    return step / whole


def _chosen_layers(shape: ModelShape, config: CompressConfig) -> list[LayerShape]:
    chosen = range(len(shape.layers)) if config.layers is None else config.layers
    return [shape.layers[index] for index in chosen]
