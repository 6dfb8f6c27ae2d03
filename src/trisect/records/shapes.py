"""Sizes of a model's layers: integers only, enough to count parameters, cache bytes and FLOPs."""

from dataclasses import dataclass, field, replace

COMPONENTS = ("qk", "ov", "mlp")
LINEARS = {"qk": ("q", "k"), "ov": ("v", "o"), "mlp": ("gate", "up", "down")}
"""Component -> the linear maps it is made of, by the same names in every family, fused or not."""
INPUTS = {"q": "x", "k": "x", "v": "x", "o": "a", "gate": "up", "up": "up", "down": "down"}
"""Linear map -> its input's name in the moments: x attention, a heads' outputs, up MLP, down neurons."""
STRICT = {"strict": True, "extra": "forbid"}
"""How pydantic reads a record from a file: no text for a number, nothing besides its fields."""
WIDTH_FIELDS = {"qk": "qk", "ov": "vo", "mlp": "mlp"}
"""Component -> the field that holds its width in the records below."""


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """A linear map that was replaced by two."""

    __pydantic_config__ = STRICT
    name: str
    rank: int  # per group
    groups: int = 1
    cached: bool = False  # the KV cache is to hold the narrow side (docs/design.md, 'Factored linear maps')


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Inner widths of one layer and the fixed sizes around them."""

    d_model: int
    heads: int
    kv_heads: int
    qk: int  # query/key head width
    pairs: int  # rotation pairs in a query/key head: qk / 2 with full RoPE, fewer with partial RoPE, 0 without
    vo: int  # value/output head width
    mlp: int  # of the MLP, or of each routed expert
    gated: bool
    experts: int = 0  # routed experts in place of one MLP; 0 without a router
    dropped_experts: int = 0  # experts that there were besides
    top_k: int = 0  # experts that a token is routed to
    shared: int = 0  # width of the expert that every token passes, in widths of a routed one
    qk_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    up_bias: bool = False
    down_bias: bool = False
    qk_norm: bool = False
    shared_output: bool = False  # one output projection for all heads (the paper's OV-overall study)
    folded: bool = False  # pairs turn at rates of their own instead of the model's frequencies
    linears: tuple[LinearShape, ...] = ()  # the linear maps that became two; empty for dense and narrow layers
    # Not in the repr, which a model's fingerprint is made of: those of files that exist stay as they are.
    components: tuple[str, ...] = field(default=COMPONENTS, repr=False)
    """Those that can be narrowed; whatever else a layer has is left whole, and its widths are 0 or stay."""
    output_gate: bool = field(default=False, repr=False)
    """Queries' projection also makes a gate on every channel that heads put out."""
    rotated: int = field(default=0, repr=False)
    """Rotated channels of a query head beside the `qk` ones, left whole; their key is shared by all heads (MLA)."""
    q_in: int = field(default=0, repr=False)
    """Channels that queries are made of where those are a latent; 0 where it is the model's width."""
    kv_in: int = field(default=0, repr=False)
    """The same for keys and values; the cache then holds this latent and the shared rotated key."""
    norm_together: bool = field(default=False, repr=False)  # a QK-norm takes its mean over all heads
    whole: int = field(default=0, repr=False)
    """Elements of the layer's matrices that are in no component; `other_parameters` counts them."""

    @property
    def mlps(self) -> int:
        """MLPs of width `mlp` in the layer: what its size counts."""
        return self.experts + self.shared if self.experts else 1

    @property
    def active_mlps(self) -> int:
        """MLPs of width `mlp` that one token passes: what its FLOPs count."""
        return self.top_k + self.shared if self.experts else 1

    def width(self, component: str) -> int:
        """The width of a component as it is."""
        return int(getattr(self, WIDTH_FIELDS[component]))


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """All layers, and the parameters outside them."""

    layers: tuple[LayerShape, ...]
    other_parameters: int
    """Embeddings, norms, heads, layers left whole: everything that is no weight or bias of a component."""
    bytes_per_element: int

    def with_depth(self, depth: int, *, apart: int) -> "ModelShape":
        """The same with fewer or more layers, all alike, each with `apart` parameters outside its components."""
        layers = (self.layers + self.layers[:1] * depth)[:depth]
        other = self.other_parameters + (depth - len(self.layers)) * apart
        return replace(self, layers=layers, other_parameters=other)


def paired(before: ModelShape, after: ModelShape) -> list[tuple[LayerShape, LayerShape]]:
    """What each layer that is left was and is; where some were dropped, all were alike."""
    return list(zip(before.layers[: len(after.layers)], after.layers, strict=True))


@dataclass(frozen=True, kw_only=True)
class LayerWidths:
    """The inner widths a layer is to have (or has)."""

    __pydantic_config__ = STRICT
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
