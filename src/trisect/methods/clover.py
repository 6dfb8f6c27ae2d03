"""CLOVER: A3's problems for QK and OV with the identity in place of every input moment.  docs/math.md, 10

Without RoPE this is the truncated SVD of each head's W_q W_k^T and W_v W_o. Rotation stands between query and
key, so with RoPE there is nothing to decompose (the paper names it as its limit) and what is left is A3's
choice of pairs with energies from the weights alone.
"""

from functools import partial

from torch import Tensor

from trisect.methods.a3 import solve_ov, solve_qk, sum_groups, weight_moment
from trisect.methods.method import ComponentMethod, Options
from trisect.records.parts import OV, QK, Moments, Shrunk


def query_key_moments(part: QK, moments: Moments) -> tuple[Tensor, Tensor]:
    """C_q summed over each group, and C_k, both with R = I.                                  [math.md L-7]"""
    C_q = sum_groups(weight_moment(part.W_q, part.b_q), part.group)
    return C_q, weight_moment(part.W_k, part.b_k)


def value_moment(part: OV, moments: Moments) -> Tensor:
    """C_v with R = I."""
    return weight_moment(part.W_v, part.b_v)


def solve_clover_qk(part: QK, moments: Moments, width: int, options: Options) -> Shrunk:
    """A3's QK solver; a norm's denominator takes statistics to correct, and this method has none."""
    if part.norm_q is not None:
        note = "QK left whole: clover reads no statistics that could correct its norm"
        return Shrunk(part=part, loss=0.0, total=0.0, note=note)
    return solve_qk(part, moments, width, options, second_moments=query_key_moments)


CLOVER = ComponentMethod(
    name="clover",
    summary="Baseline: SVD of each head's fused weights; with RoPE, pairs by weight.",
    solvers={"qk": solve_clover_qk, "ov": partial(solve_ov, second_moment=value_moment)},
    reads={"qk": frozenset(), "ov": frozenset()},
)
