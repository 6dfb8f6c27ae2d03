"""Baselines on components: structured magnitude and Wanda, CLOVER, and REAP.                docs/math.md, 9, 10

Magnitude and Wanda keep whole rotation pairs, unrotated channels and MLP neurons by the summed size of their
weights, as they are or times the root mean square of the inputs they meet. Nothing is mixed or compensated.
"""

from functools import partial
from typing import Any

from torch import Tensor

from trisect.methods import a3
from trisect.methods.experts import drop_experts
from trisect.methods.fold import keep_neurons
from trisect.methods.method import ComponentMethod, Options, need, reads
from trisect.records.parts import MLP, QK, Moments, Shrunk
from trisect.solve.lowrank import SOLVE_DTYPE
from trisect.solve.select import Channels, pair_scores, top

# h = query heads, k = key heads, d = head width, P = rotation pairs, p = pairs kept, s = unrotated channels


def solve_qk(part: QK, moments: Moments, width: int, options: Options, *, by_input: bool) -> Shrunk:
    """Pairs of rotated channels and single unrotated ones, by query size times key size.     [math.md L-8]"""
    x = need(moments, "x_energy").sqrt() if by_input else None  # (D,)
    q = a3.sum_groups(channel_sizes(part.W_q, part.b_q, part.norm_q, x), part.group)  # (h, d) -> (k, d)
    k = channel_sizes(part.W_k, part.b_k, part.norm_k, x)
    rest = Channels(values=(q * k)[:, 2 * part.num_pairs :])  # (k, s)
    return a3.keep_pairs(part, pair_scores(q, k, part.num_pairs), rest, moments, width, options)


def solve_mlp(part: MLP, moments: Moments, width: int, options: Options, *, by_input: bool) -> Shrunk:
    """Neurons by their rows of the down projection, as in A3's own problem.                  [math.md L-8]"""
    scores = part.W_down.to(SOLVE_DTYPE).abs().sum(dim=-1)  # (I,)
    scores = need(moments, "down_energy").sqrt() * scores if by_input else scores
    kept, lost = top(scores, width)
    return Shrunk(part=keep_neurons(part, kept), loss=lost.item(), total=scores.sum().item())


def channel_sizes(W: Tensor, b: Tensor | None, norm: Tensor | None, x: Tensor | None) -> Tensor:
    """sum_j |W_ji| |x_j| of every channel (heads, d); W is (heads, D, d)."""
    # A bias is the weight of one more input that is always 1. A norm's weights scale channels; its denominator
    # is common to a head and ranks nothing.
    sizes = W.to(SOLVE_DTYPE).abs()
    sizes = (sizes if x is None else x.unsqueeze(-1) * sizes).sum(dim=-2)
    sizes = sizes if b is None else sizes + b.to(SOLVE_DTYPE).abs()
    return sizes if norm is None else sizes * norm.to(SOLVE_DTYPE).abs()


def solve_clover_qk(part: QK, moments: Moments, width: int, options: Options) -> Shrunk:
    """A3's QK solver with R = I; a norm's denominator takes statistics, and here are none.    [math.md L-7]"""
    if part.norm_q is not None:
        note = "QK left whole: clover reads no statistics that could correct its norm"
        return Shrunk(part=part, loss=0.0, total=0.0, note=note)
    return a3.solve_qk(part, moments, width, options, by_weight="qk")


def leave(part: MLP, moments: Moments, width: int, options: Options) -> Shrunk:
    """A layer without experts, between others that have some, stays as it is."""
    return Shrunk(part=part, loss=0.0, total=0.0, note="one MLP: there is nothing to drop")


def _selection(name: str, summary: str, *, qk: str = "", mlp: str = "", **how: Any) -> ComponentMethod:
    return ComponentMethod(
        name=name,
        summary=summary,
        solvers={"qk": partial(solve_qk, **how), "mlp": partial(solve_mlp, **how)},
        # The squares are only there, and only read, where a norm stands between projection and rotation.
        reads=reads(qk=f"q_squares k_squares {qk}", mlp=mlp),
    )


MAGNITUDE = _selection(
    "magnitude", "Baseline: pairs and neurons with the largest weights, the paper's abs(w).", by_input=False
)
WANDA = _selection(
    "wanda",
    "Baseline: pairs and neurons by weight size times input loudness.",
    qk="x_energy",
    mlp="down_energy",
    by_input=True,
)
# A3's problems for QK and OV with the identity in place of every input moment. Without RoPE this is the truncated SVD
# of each head's W_q W_k^T and W_v W_o. With RoPE there is nothing to decompose (the paper names it as its limit), and
# what is left is A3's choice of pairs with energies from the weights alone.
CLOVER = ComponentMethod(
    name="clover",
    summary="Baseline: SVD of each head's fused weights; with RoPE, pairs by weight.",
    solvers={"qk": solve_clover_qk, "ov": partial(a3.solve_ov, of="W")},
    reads=reads(qk="", ov=""),
)
REAP = ComponentMethod(
    name="reap",
    summary="Baseline: drops experts by their router-weighted output; nothing else changes.",
    solvers={"mlp": leave},
    reads=reads(mlp="out_norm"),
    mixture=drop_experts,
)
