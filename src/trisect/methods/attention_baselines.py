"""Rivals for attention alone: CLOVER narrows heads by their weights, Palu caches narrow latents.   docs/math.md, 10"""

from functools import partial

import torch

from trisect.methods.a3 import solve_ov, solve_qk
from trisect.methods.fold import like
from trisect.methods.method import ComponentMethod, LinearMethod, Options, need, reads
from trisect.records.parts import QK, Factored, Linear, Moments, Shrunk
from trisect.solve.lowrank import gram_weight, low_rank

# CLOVER is A3's problems for QK and OV with the identity in place of every input moment. Without RoPE this is the
# truncated SVD of each head's W_q W_k^T and W_v W_o. Rotation stands between query and key, so with RoPE there is
# nothing to decompose (the paper names it as its limit) and what is left is A3's choice of pairs with energies from
# the weights alone.


def solve_clover_qk(part: QK, moments: Moments, width: int, options: Options) -> Shrunk:
    """A3's QK solver with R = I; a norm's denominator takes statistics, and here are none.    [math.md L-7]"""
    if part.norm_q is not None:
        note = "QK left whole: clover reads no statistics that could correct its norm"
        return Shrunk(part=part, loss=0.0, total=0.0, note=note)
    return solve_qk(part, moments, width, options, by_weight="qk")


CLOVER = ComponentMethod(
    name="clover",
    summary="Baseline: SVD of each head's fused weights; with RoPE, pairs by weight.",
    solvers={"qk": solve_clover_qk, "ov": partial(solve_ov, of="W")},
    reads=reads(qk="", ov=""),
)


# Palu factors heads in groups (G-LRD): a middle way between one latent for all heads, whose reconstruction is dear,
# and one per head, which shares nothing.

GROUP = 4  # heads that share a latent, where their number allows: the paper's group size


def head_groups(heads: int) -> int:
    """How many groups `heads` are factored in: as few as there are with at most GROUP heads each."""
    return heads // next(size for size in range(GROUP, 0, -1) if heads % size == 0)


def cache_rank(inputs: int, outputs: int, heads: int, ratio: float) -> int:
    """The rank of each group whose latents take (1 - ratio) of the cache.                   [math.md L-6]"""
    full = outputs // head_groups(heads)
    # 1 - 0.3 is not 0.7 in binary; nine digits keep such dust from deciding a tie.
    return max(1, min(round(round((1 - ratio) * full, 9)), inputs))


def solve_group_heads(part: Linear, moments: Moments, width: int, options: Options) -> Factored:
    """A whitened SVD for each group of heads by itself.                                     [math.md L-6]"""
    groups = head_groups(part.heads)
    weight = gram_weight(need(moments, "x_gram"))
    W = part.W.unflatten(-1, (groups, -1)).movedim(1, 0)  # (in, out) -> (g, in, s d)
    best = [low_rank(columns, width, weight) for columns in W]
    return Factored(
        name=part.name,
        A=like(part.W, torch.cat([group.A for group in best], dim=1)),  # (in, g r)
        B=like(part.W, torch.stack([group.B for group in best])),  # (g, r, s d)
        b=part.b,
        cached=True,
        loss=sum(group.loss for group in best),
        total=sum(group.total for group in best),
        clipped=weight.clipped,
    )


PALU = LinearMethod(
    name="palu",
    summary="Baseline: narrow latents for keys and values; the ratio is of the KV cache.",
    solvers=dict.fromkeys(("k", "v"), solve_group_heads),
    reads=reads(k="x_gram", v="x_gram"),
    rank=cache_rank,
    groups=head_groups,
    cached=True,
    search="fisher",
    allocate="search",
)
