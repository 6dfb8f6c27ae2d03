"""Floating-point operations and bytes of compressing one layer, counted from shapes: leading terms only.

T = tokens, D = d_model, A = heads x head width, I = MLP width, E = experts
"""

from dataclasses import dataclass

from trisect.calibrate.fisher import METRIC_SHARE, METRIC_TOKENS
from trisect.calibrate.linearised import directions
from trisect.calibrate.replay import TOKENS_PER_BATCH, held_windows
from trisect.calibrate.scores import shares
from trisect.calibrate.streams import STATES
from trisect.solve.ridge import SKETCH, STRENGTHS

KEPT = 0.75  # of every width, at --ratio 0.25
SINGLE, DOUBLE = 4, 8  # bytes of an activation here, and of a sum
IN_DOUBLE = ("ov", "mlp", "refit-up", "metric")
"""Stages that compute in float64."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder layer; without experts, its one MLP is the one that every token passes."""

    d_model: int
    mlp: int  # of one expert
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 1
    active: int = 1  # routed experts that a token passes
    shared: int = 0  # further ones that every token passes

    @property
    def attended(self) -> int:
        """What W_o reads of a token."""
        return self.heads * self.head_dim

    def attention(self, length: int) -> float:
        """Operations of attention for one token of a window."""
        kv = self.kv_heads * self.head_dim
        return 4 * self.d_model * (self.attended + kv) + 2 * self.attended * length

    def mlps(self) -> float:
        """Operations of the MLPs that one token passes."""
        return 6 * self.d_model * self.mlp * (self.active + self.shared)

    def expert_sums(self) -> int:
        """Bytes of one expert's Gram and product with its targets, fitted and held out."""
        return 2 * DOUBLE * self.mlp * (self.mlp + self.d_model)


def regression(n: int, outputs: int) -> float:
    """A ridge chosen on held-out tokens: a Cholesky factor for each strength, and one for the answer."""
    few = min(SKETCH, outputs)
    return len(STRENGTHS) * (n**3 / 3 + 4 * n**2 * few) + n**3 / 3 + 8 * n**2 * outputs


def elimination(n: int, kept: int, outputs: int) -> float:
    """The weights to choose against, the inverse Gram, and the updates of both."""
    chosen_against = n**3 / 3 + 4 * n**2 * outputs + 2 * n * outputs**2
    return chosen_against + 10 / 3 * n**3 + 2 / 3 * (n**3 - kept**3) + (n**2 - kept**2) * outputs


def queries(tokens: int, length: int) -> int:
    """Queries that are sampled of a layer."""
    windows = tokens // length
    each, every = shares(windows, length)
    return windows // every * each


def operations(shape: Shape, method: str, *, tokens: int, length: int, refit: bool) -> dict[str, float]:
    """Of one layer, by stage; with `refit`, W_up and W_gate are refitted as well."""
    attention, mlps, D, A = shape.attention(length), shape.mlps(), shape.d_model, shape.attended
    if method == "a3":
        heads = 4 * shape.head_dim**2 * (shape.heads + shape.kv_heads)
        return {"forward": tokens * (attention + mlps), "grams": tokens * heads}
    kept, passed, width = int(KEPT * shape.mlp), shape.active + shape.shared, int(KEPT * A)
    solved = shape.experts + shape.shared
    drawn = min(METRIC_TOKENS, tokens // METRIC_SHARE)
    # Dense, for pairs, for values (both leave the layer behind attention), for neurons, and on behind the layer.
    forward = tokens * (attention + mlps) * (2 + KEPT) + tokens * attention * 2
    grams = 2 * A * (A + D) + 2 * passed * shape.mlp * (shape.mlp + D)
    scores = 2 * queries(tokens, length) * length / 2 * 2 * shape.heads * shape.head_dim**2
    found = {
        "forward": forward,
        "grams": tokens * grams + scores,
        "ov": A**3 / 3 + 4 * A**2 * D + 2 * A * D**2 + 2 * A * width * (A + width) + regression(width, D),
        "mlp": solved * (elimination(shape.mlp, kept, D) + regression(kept, D)),
        "backward": drawn * 3 * (attention + mlps),
        "metric": D**3 / 3,
    }
    if refit:
        weights = D * kept * passed
        held, count = (
            length * held_windows(tokens // length),
            directions(tokens * passed / (solved * kept), 2 * D * kept),
        )
        found["forward"] += tokens * (attention + KEPT * mlps) * 2
        found["grams"] += 2 * tokens * passed * kept * (kept + D)
        found["products"] = (tokens - held) * 12 * (count + 1) * weights + held * 6 * count * weights
        found["refit-up"] = solved * (D**3 + (count + 1) * 8 * D**2 * kept)
        found["mlp"] += solved * regression(kept, D)
    return found


def moments(shape: Shape, method: str, *, tokens: int, refit: bool) -> int:
    """Bytes of what the largest step of a layer is solved from."""
    if method == "a3":
        return DOUBLE * (2 * shape.head_dim**2 * (shape.heads + shape.kv_heads) + shape.experts * shape.mlp)
    attention = 2 * DOUBLE * shape.attended * (shape.attended + shape.d_model)
    kept, solved = int(KEPT * shape.mlp), shape.experts + shape.shared
    share = (shape.active + shape.shared) / (solved * kept)
    count = directions(tokens * share, 2 * shape.d_model * kept) if refit else 0
    return max(attention, solved * max(shape.expert_sums(), count * shape.d_model * 2 * kept * SINGLE))


def memory(shape: Shape, method: str, *, tokens: int, length: int, refit: bool) -> float:
    """Bytes at the peak: hidden states and rows that are kept, moments, and what a batch makes on its way."""
    passed = shape.active + shape.shared
    sets = 1 if method == "a3" else STATES
    batch = 8 * shape.d_model + 4 * shape.mlp * passed + shape.heads * length
    rows = passed * (2 * shape.d_model + 2 * int(KEPT * shape.mlp)) if refit else 0
    numbers = tokens * (sets * shape.d_model + rows) + min(tokens, TOKENS_PER_BATCH) * batch
    return SINGLE * numbers + moments(shape, method, tokens=tokens, refit=refit)
