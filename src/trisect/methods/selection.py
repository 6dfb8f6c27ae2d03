"""Structured magnitude pruning and structured Wanda, rivals for pairs and neurons, and REAP.   docs/math.md, 9, 10

Whole rotation pairs, unrotated channels and MLP neurons stay or go by the summed size of their weights, as
they are (magnitude) or times the loudness of the inputs they meet (wanda). Nothing is mixed or compensated.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from trisect.methods.a3 import keep_pairs, sum_groups
from trisect.methods.experts import drop_experts
from trisect.methods.fold import keep_neurons
from trisect.methods.method import ComponentMethod, Method, Options, need, reads
from trisect.records.parts import MLP, QK, Moments, Shrunk
from trisect.solve.lowrank import SOLVE_DTYPE
from trisect.solve.select import Channels, pair_scores, top

# h = query heads, k = key heads, d = head width, P = rotation pairs, p = pairs kept, s = unrotated channels

Loudness = Callable[[Moments, str], Tensor | None]
"""(moments, name of an input) -> root mean square of each of its channels (in,); None counts all alike."""


def solve_qk(part: QK, moments: Moments, width: int, options: Options, *, loudness: Loudness) -> Shrunk:
    """Pairs of rotated channels and single unrotated ones, by query size times key size.     [math.md L-8]"""
    x = loudness(moments, "x")
    q = sum_groups(channel_sizes(part.W_q, part.b_q, part.norm_q, x), part.group)  # (h, d) -> (k, d)
    k = channel_sizes(part.W_k, part.b_k, part.norm_k, x)
    rest = Channels(values=(q * k)[:, 2 * part.num_pairs :])  # (k, s)
    return keep_pairs(part, pair_scores(q, k, part.num_pairs), rest, moments, width, options)


def solve_mlp(part: MLP, moments: Moments, width: int, options: Options, *, loudness: Loudness) -> Shrunk:
    """Neurons by their rows of the down projection, as in A3's own problem.                  [math.md L-8]"""
    scores = part.W_down.to(SOLVE_DTYPE).abs().sum(dim=-1)  # (I,)
    x = loudness(moments, "down")
    scores = scores if x is None else x * scores
    kept, lost = top(scores, width)
    return Shrunk(part=keep_neurons(part, kept), loss=lost.item(), total=scores.sum().item())


def channel_sizes(W: Tensor, b: Tensor | None, norm: Tensor | None, loudness: Tensor | None) -> Tensor:
    """sum_j |W_ji| |x_j| of every channel (heads, d); W is (heads, D, d)."""
    # A bias is the weight of one more input that is always 1. A norm's weights scale channels; its denominator
    # is common to a head and ranks nothing.
    sizes = W.to(SOLVE_DTYPE).abs()
    sizes = (sizes if loudness is None else loudness.unsqueeze(-1) * sizes).sum(dim=-2)
    sizes = sizes if b is None else sizes + b.to(SOLVE_DTYPE).abs()
    return sizes if norm is None else sizes * norm.to(SOLVE_DTYPE).abs()


def all_alike(moments: Moments, source: str) -> None:
    """Magnitude pruning: no input counts more than another."""
    return None


def root_mean_square(moments: Moments, source: str) -> Tensor:
    """Wanda: an input counts by its loudness (in,)."""
    return need(moments, f"{source}_energy").sqrt()


def _selection(name: str, summary: str, loudness: Loudness, *, qk: str = "", mlp: str = "") -> Method:
    return ComponentMethod(
        name=name,
        summary=summary,
        solvers={"qk": partial(solve_qk, loudness=loudness), "mlp": partial(solve_mlp, loudness=loudness)},
        # The squares are only there, and only read, where a norm stands between projection and rotation.
        reads=reads(qk=f"q_squares k_squares {qk}", mlp=mlp),
    )


MAGNITUDE = _selection(
    "magnitude", "Baseline: pairs and neurons with the largest weights, the paper's abs(w).", all_alike
)
WANDA = _selection(
    "wanda",
    "Baseline: pairs and neurons by weight size times input loudness.",
    root_mean_square,
    qk="x_energy",
    mlp="down_energy",
)


def leave(part: MLP, moments: Moments, width: int, options: Options) -> Shrunk:
    """A layer without experts, between others that have some, stays as it is."""
    return Shrunk(part=part, loss=0.0, total=0.0, note="one MLP: there is nothing to drop")


REAP = ComponentMethod(
    name="reap",
    summary="Baseline: drops experts by their router-weighted output; nothing else changes.",
    solvers={"mlp": leave},
    reads=reads(mlp="out_norm"),
    mixture=drop_experts,
)
