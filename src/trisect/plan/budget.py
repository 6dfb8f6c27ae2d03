"""What a shape costs: parameters, cache bytes and FLOPs, counted from integers alone.

Convention with `ModelShape.other_parameters`: it holds embeddings, norms and the head. Biases of
the decoder's linear layers are not in it: they shrink too, and are counted from the shape's flags.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trisect.records.parts import COMPONENTS, LINEARS
from trisect.records.shapes import LayerShape, ModelShape

PREFILL_LENGTH = 2048


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The cost of one model."""

    components: Mapping[str, int]
    """Component -> parameters of its matrices, over all layers."""
    linear_parameters: int
    """All matrices of the decoder layers: what `ratio` is a fraction of."""
    parameters: int
    """Everything: matrices, biases, norms, embeddings."""
    kv_bytes_per_token: int
    flops: int
    """One prefill of PREFILL_LENGTH tokens through all decoder layers, batch 1."""

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "components": dict(self.components)}


@dataclass(frozen=True, kw_only=True)
class Change:
    """The share of each cost that is gone."""

    components: Mapping[str, float]
    ratio: float
    """Of the decoder's linear weights: the paper's compression ratio."""
    parameters: float
    """Of the whole model, embeddings included."""
    kv_bytes_per_token: float
    flops: float

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "components": dict(self.components)}


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs by kind, a multiply-add counted as two."""

    projections: int = 0
    scores: int = 0
    """Queries times keys and weights times values, all of them: the paper does not halve for causality."""
    softmax: int = 0
    mlp: int = 0
    norms: int = 0
    residuals: int = 0
    head: int = 0
    """Logits; the paper counts decoder layers only."""

    @property
    def layers(self) -> int:
        """What the paper counts."""
        return self.total - self.head

    @property
    def matrices(self) -> int:
        """Matrix products alone: what a profiler counts."""
        return self.projections + self.scores + self.mlp + self.head

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(vars(self).values())

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def budget_of(shape: ModelShape) -> Budget:
    """Count a model."""
    components = {
        component: sum(matrix_parameters(layer, component) for layer in shape.layers) for component in COMPONENTS
    }
    linear = sum(components.values())
    biases = sum(bias_parameters(layer) for layer in shape.layers)
    cached = sum(cached_channels(layer) for layer in shape.layers)
    return Budget(
        components=components,
        linear_parameters=linear,
        parameters=linear + biases + shape.other_parameters,
        kv_bytes_per_token=cached * shape.bytes_per_element,
        flops=sum(flops_of(layer, length=PREFILL_LENGTH) for layer in shape.layers),
    )


def compare(before: Budget, after: Budget) -> Change:
    """What went, as fractions of what was there."""
    return Change(
        components={name: _removed(count, after.components[name]) for name, count in before.components.items()},
        ratio=_removed(before.linear_parameters, after.linear_parameters),
        parameters=_removed(before.parameters, after.parameters),
        kv_bytes_per_token=_removed(before.kv_bytes_per_token, after.kv_bytes_per_token),
        flops=_removed(before.flops, after.flops),
    )


def matrix_parameters(layer: LayerShape, component: str) -> int:
    """Matrix elements of one component of one layer."""
    return sum(linear_parameters(layer, name) for name in linears_of(layer, component))


def linears_of(layer: LayerShape, component: str) -> tuple[str, ...]:
    """The linear maps that a component of this layer is made of."""
    if component not in layer.components:
        return ()
    return tuple(name for name in LINEARS[component] if name != "gate" or layer.gated)


def linear_parameters(layer: LayerShape, name: str) -> int:
    """Matrix elements of one linear map, or of the two that it became."""
    d_in, d_out = linear_sizes(layer, name)
    for linear in layer.linears:
        if linear.name == name:
            # Each group has its own narrow map of the whole input; the wide map is block-diagonal.
            return linear.rank * (linear.groups * d_in + d_out)
    return d_in * d_out


def linear_sizes(layer: LayerShape, name: str) -> tuple[int, int]:
    """Inputs and outputs of one linear map."""
    D = layer.d_model
    output_heads = 1 if layer.shared_output else layer.heads
    return {
        "q": (layer.q_in or D, layer.heads * (layer.qk + layer.rotated)),
        "k": (layer.kv_in or D, layer.kv_heads * layer.qk),
        "v": (layer.kv_in or D, layer.kv_heads * layer.vo),
        "o": (output_heads * layer.vo, D),
        "gate": (D, layer.mlp),
        "up": (D, layer.mlp),
        "down": (layer.mlp, D),
    }[name]


def linear_heads(layer: LayerShape, name: str) -> int:
    """Heads side by side in the outputs of one linear map (in the inputs of o); 1 in an MLP."""
    output_heads = 1 if layer.shared_output else layer.heads
    return {"q": layer.heads, "k": layer.kv_heads, "v": layer.kv_heads, "o": output_heads}.get(name, 1)


def cached_channels(layer: LayerShape) -> int:
    """Numbers the KV cache holds per token; a key is cached narrow only where nothing rotates or norms it."""
    if layer.kv_in:
        return layer.kv_in + layer.rotated
    channels = {"k": layer.kv_heads * layer.qk, "v": layer.kv_heads * layer.vo}
    plain_keys = layer.pairs == 0 and not layer.qk_norm
    for linear in layer.linears:
        if linear.cached and (linear.name == "v" or (linear.name == "k" and plain_keys)):
            channels[linear.name] = linear.groups * linear.rank
    return sum(channels.values())


def bias_parameters(layer: LayerShape) -> int:
    """Bias elements of one layer's linear maps."""
    biases = {
        "qk": (layer.heads + layer.kv_heads) * layer.qk * layer.qk_bias,
        "ov": layer.kv_heads * layer.vo * layer.v_bias + layer.d_model * layer.o_bias,
        "mlp": (2 if layer.gated else 1) * layer.mlp * layer.up_bias + layer.d_model * layer.down_bias,
    }
    return sum(biases[component] for component in layer.components)


def flops_of(layer: LayerShape, *, length: int, batch: int = 1) -> int:
    """FLOPs of one layer's prefill: every token looks at all of them."""
    return layer_flops(layer, batch=batch, tokens=length, context=length).total


def layer_flops(layer: LayerShape, *, batch: int, tokens: int, context: int) -> Flops:
    """One layer: `tokens` new ones in each sequence, each looking at `context` keys.

    With tokens = context = L this is the paper's formula (appendix, runtime analysis), with unequal widths
    and shared key heads: 8BLHD + 4BL^2 AD + BL^2 A + 6BLIH + 4BLH, where the first D is the width of all
    heads together and the second that of one head.
    """
    rows = batch * tokens
    return Flops(
        projections=2 * rows * (matrix_parameters(layer, "qk") + matrix_parameters(layer, "ov") + layer.whole),
        scores=2 * rows * context * layer.heads * (layer.qk + layer.rotated + layer.vo),
        softmax=rows * context * layer.heads,
        mlp=2 * rows * matrix_parameters(layer, "mlp"),
        norms=2 * rows * layer.d_model,
        residuals=2 * rows * layer.d_model,
    )


def _removed(before: int, after: int) -> float:
    return 1 - after / before if before else 0.0
