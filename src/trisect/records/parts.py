"""Parts and solutions: the only words that methods and models share.

A Part is what a method is given, a Solution what it gives back. Both are plain tensors in one canonical
layout, whatever the checkpoint's fused matrices, transposed weights or rotary channel order look like.

Row-vector convention, as in the paper: q = x W_q + b_q.
h = query heads, h_kv = key/value heads, D = d_model, d = head width, I = MLP intermediate width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trisect.records.shapes import COMPONENTS, INPUTS, LINEARS  # noqa: F401

Moments = Mapping[str, Tensor]
"""One layer's calibration statistics by name; docs/math.md, section 1, lists them with their shapes."""
METRIC = "metric"  # among them: a root (D, D) of how much the model's answers feel of a layer's output channels


@dataclass(frozen=True, kw_only=True)
class QK:
    """Query and key projections of one layer.

    Head channels are ordered [first of each rotation pair | second of each pair | not rotated].
    """

    W_q: Tensor  # (h, D, d)
    W_k: Tensor  # (h_kv, D, d)
    b_q: Tensor | None = None  # (h, d)
    b_k: Tensor | None = None  # (h_kv, d)
    frequencies: Tensor  # (h_kv, pairs) index of each pair's frequency; pairs = 0 without RoPE
    norm_q: Tensor | None = None  # (h, d) RMS-norm weights between projection and rotation
    norm_k: Tensor | None = None  # (h_kv, d)
    rates: Tensor | None = None
    """(h_kv, pairs) radians per token, where pairs turn at rates of their own (folded frequencies); the
    indices in `frequencies` then name the model's nearest ones."""

    @property
    def width(self) -> int:
        return self.W_q.shape[-1]

    @property
    def num_pairs(self) -> int:
        return self.frequencies.shape[-1]

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.W_q.shape[0] // self.W_k.shape[0]


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Rotating slots that may stand in for a head's pairs, each at a rate of its own.

    Pairs and slots are complex rows here (first + i second): k' = k k_map, q' = q q_map.
    """

    k_map: Tensor  # (h_kv, pairs, slots) complex
    q_map: Tensor  # (h_kv, pairs, slots) complex
    rates: Tensor  # (h_kv, slots) radians per token


@dataclass(frozen=True, kw_only=True)
class OV:
    """Value and output projections of one layer."""

    W_v: Tensor  # (h_kv, D, d)
    W_o: Tensor  # (h, d, D); (1, d, D) where all heads share one output projection
    b_v: Tensor | None = None  # (h_kv, d)
    b_o: Tensor | None = None  # (D,)
    W_g: Tensor | None = None  # (h, D, d) a gate sigmoid(x W_g + b_g) on what the heads put out, channel by channel
    b_g: Tensor | None = None  # (h, d)
    heads: int

    @property
    def width(self) -> int:
        return self.W_v.shape[-1]

    @property
    def group(self) -> int:
        """Query heads that share one value head."""
        return self.heads // self.W_v.shape[0]


@dataclass(frozen=True, kw_only=True)
class MLP:
    """Up, gate and down projections of one layer."""

    W_up: Tensor  # (D, I)
    W_gate: Tensor | None = None  # (D, I)
    W_down: Tensor  # (I, D)
    b_up: Tensor | None = None  # (I,)
    b_gate: Tensor | None = None  # (I,)
    b_down: Tensor | None = None  # (D,)

    @property
    def width(self) -> int:
        return self.W_down.shape[0]


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The MLPs of a mixture: those a router chooses among, all of one width, and the one every token passes."""

    routed: tuple[MLP, ...]
    numbers: tuple[int, ...]  # which of the original experts each routed one is
    top_k: int  # experts that a token is routed to
    shared: MLP | None = None

    @property
    def width(self) -> int:
        """Of a routed expert; the shared one has a multiple of it."""
        return self.routed[0].width


@dataclass(frozen=True, kw_only=True)
class Linear:
    """One linear map of a layer by itself: y = x W + b."""

    name: str  # a key of INPUTS
    W: Tensor  # (in, out)
    b: Tensor | None = None  # (out,)
    heads: int = 1  # heads side by side in `out` (query, key, value) or in `in` (output); 1 in an MLP

    @property
    def width(self) -> int:
        """The rank it can have."""
        return min(self.W.shape)


Part = QK | OV | MLP | Experts | Linear

INNER = "inner"  # prefix of the regression of what an MLP lacks on what directions of its input weights change
REGRESSED = ("gram", "target", "energy", "tokens")  # what a regression is made of, as NAME_gram and so on


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """What a part's channels or neurons carry, the largest first: a cut keeps the left of it."""

    of: str  # what the energies are those of
    length: int  # channels of a head, or neurons
    values: tuple[float, ...]  # shares of all energy, at `even_ranks` where there are more channels than numbers

    def to_dict(self) -> dict[str, Any]:
        """As it stands in a receipt."""
        return {"of": self.of, "length": self.length, "values": list(self.values)}


def even_ranks(length: int, points: int) -> list[int]:
    """`points` places among `length`, the first and the last among them, as evenly as they come."""
    return [round(n * (length - 1) / max(1, points - 1)) for n in range(points)]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What every solution says about itself."""

    loss: float  # predicted value of the component's objective on the calibration tokens (docs/math.md)
    total: float  # the same objective with the whole component dropped, so loss / total is the share lost
    clipped: float = 0.0  # share of directions that fell below the numerical floor and were treated as silent
    note: str = ""  # what the user should know, e.g. why a component was left as it was
    spectrum: Spectrum | None = None  # what the cut was made on, where the solver has it


@dataclass(frozen=True, kw_only=True)
class Shrunk(Outcome):
    """The same component, narrower inside."""

    part: Part


@dataclass(frozen=True, kw_only=True)
class Factored(Outcome):
    """One linear map becomes two: y = (x A) B + b; with several groups, B is block-diagonal."""

    name: str
    A: Tensor  # (in, groups * rank)
    B: Tensor  # (groups, rank, out / groups)
    b: Tensor | None = None  # (out,)
    cached: bool = False  # keys or values whose cache is to hold x A (where no rotation stands between) instead of y

    @property
    def groups(self) -> int:
        return self.B.shape[0]

    @property
    def rank(self) -> int:
        """Per group."""
        return self.B.shape[1]


@dataclass(frozen=True, kw_only=True)
class Masked(Outcome):
    """The same linear map with zeros in it."""

    name: str
    W: Tensor  # (in, out)

    @property
    def zeros(self) -> int:
        return int((self.W == 0).sum())


Solution = Shrunk | Factored | Masked
