"""Palu: keys and values through a narrow latent that the cache holds in their place.      docs/math.md, 10

Heads are factored in groups (G-LRD): a middle way between one latent for all heads, whose reconstruction is
dear, and one per head, which shares nothing.
"""

import torch

from trisect.methods.fold import like
from trisect.methods.method import LinearMethod, Options, need
from trisect.records.parts import Factored, Linear, Moments
from trisect.solve import gram_weight, low_rank

GROUP = 4
"""Heads that share a latent, where their number allows: the paper's group size."""


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
    reads=dict.fromkeys(("k", "v"), frozenset({"x_gram"})),
    rank=cache_rank,
    groups=head_groups,
    cached=True,
    search="fisher",
    allocate="search",
)
