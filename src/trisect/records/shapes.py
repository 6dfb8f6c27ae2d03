"""Sizes of a model's layers: integers only, enough to count parameters, cache bytes and FLOPs."""

from dataclasses import dataclass, field, replace

COMPONENTS = ("qk", "ov", "mlp")

LINEARS = {"qk": ("q", "k"), "ov": ("v", "o"), "mlp": ("gate", "up", "down")}
"""Component -> the linear maps it is made of, by the same names in every family, fused or not."""

INPUTS = {"q": "x", "k": "x", "v": "x", "o": "a", "gate": "up", "up": "up", "down": "down"}
"""Linear map -> its input's name in the moments: x attention, a heads' outputs, up MLP, down neurons."""


WIDTH_FIELDS = {"qk": "qk", "ov": "vo", "mlp": "mlp"}
"""Component -> the field that holds its width in the records below."""


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """A linear map that was replaced by two."""

    name: str
    rank: int
    """Per group."""
    groups: int = 1
    cached: bool = False
    """The KV cache is to hold the narrow side (docs/design.md, 'Factored linear maps')."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Inner widths of one layer and the fixed sizes around them."""

    d_model: int
    heads: int
    kv_heads: int
    qk: int
    """Query/key head width."""
    pairs: int
    """Rotation pairs in a query/key head: qk / 2 with full RoPE, fewer with partial RoPE, 0 without."""
    vo: int
    """Value/output head width."""
    mlp: int
    gated: bool
    qk_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    up_bias: bool = False
    down_bias: bool = False
    qk_norm: bool = False
    shared_output: bool = False
    """One output projection for all heads (the paper's OV-overall study)."""
    folded: bool = False
    """Pairs turn at rates of their own instead of the model's frequencies."""
    linears: tuple[LinearShape, ...] = ()
    """The linear maps that became two; empty for dense and narrow layers."""
    # Not in the repr, which a model's fingerprint is made of: they follow from what is.
    norm_together: bool = field(default=False, repr=False)
    """A QK-norm takes its mean over all heads."""
    fixed: tuple[str, ...] = field(default=(), repr=False)
    """Components that keep their width, because a narrow one could not compute what they do."""

    def width(self, component: str) -> int:
        """The width of a component as it is."""
        return int(getattr(self, WIDTH_FIELDS[component]))

    def with_widths(self, *, qk: int, pairs: int, vo: int, mlp: int) -> "LayerShape":
        """The same layer with other inner widths."""
        return replace(self, qk=qk, pairs=pairs, vo=vo, mlp=mlp)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """All layers, and the parameters outside them."""

    layers: tuple[LayerShape, ...]
    other_parameters: int
    """Embeddings, norms, heads: everything that is not a weight or bias of a decoder layer's projections."""
    bytes_per_element: int


@dataclass(frozen=True, kw_only=True)
class LayerWidths:
    """The inner widths a layer is to have (or has)."""

    qk: int
    pairs: int
    vo: int
    mlp: int

    def of(self, component: str) -> int:
        """The width of a component."""
        return int(getattr(self, WIDTH_FIELDS[component]))


def widths_of(shape: LayerShape) -> LayerWidths:
    """The widths that a layer has now."""
    return LayerWidths(qk=shape.qk, pairs=shape.pairs, vo=shape.vo, mlp=shape.mlp)
