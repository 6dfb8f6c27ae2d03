"""Baselines: weighted SVDs, Palu's narrow cache and Wanda's masks of single linear maps; magnitude, Wanda, CLOVER
and REAP on components.                                                                          docs/math.md, 9, 10

The weighted SVDs share one problem and one solver (solve/lowrank.py) and differ in what an error at each input
counts. Palu factors heads in groups: a middle way between one latent for all heads, whose reconstruction is dear,
and one per head, which shares nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import floor
from typing import Any

import torch
from torch import Tensor

from trisect.methods import a3, experts, fold
from trisect.methods.method import ComponentMethod, LinearMethod, MaskMethod, Options, Solver, need, reads
from trisect.records.parts import INPUTS, MLP, QK, Factored, Linear, Masked, Moments, Shrunk
from trisect.solve import SOLVE_DTYPE, Channels, Regression, factor, low_rank, pair_scores, ridge, sum_groups, top

ASVD_ALPHA = 0.5  # the exponent of ASVD's paper
REFIT_RIDGE = 1e-6  # above the rounding of Grams whose batches are summed in float32; far below what moves a loss
Weigh = Callable[[Tensor], Tensor]  # L, (in,), from a moment of the inputs
GROUP = 4  # heads that share a latent, where their number allows: the group size of Palu's paper


def equal_parameters_rank(inputs: int, outputs: int, heads: int, ratio: float) -> int:
    """The rank whose two factors hold (1 - ratio) of the parameters.                       [math.md L-4]"""
    # 1 - 0.9 is not 0.1 in binary; nine digits keep such dust from costing a rank.
    return max(1, floor(round((1 - ratio) * inputs * outputs / (inputs + outputs), 9)))


def head_groups(heads: int) -> int:
    """How many groups `heads` are factored in: as few as there are with at most GROUP heads each."""
    return heads // next(size for size in range(GROUP, 0, -1) if heads % size == 0)


def cache_rank(inputs: int, outputs: int, heads: int, ratio: float) -> int:
    """The rank of each group of heads whose latents take (1 - ratio) of the cache.          [math.md L-6]"""
    return max(1, min(round(round((1 - ratio) * (outputs // head_groups(heads)), 9)), inputs))


def kept_per_output(inputs: int, outputs: int, heads: int, ratio: float) -> int:
    """Weights that every output of a masked map keeps.                                      [math.md L-9]"""
    return max(1, round(round((1 - ratio) * inputs, 9)))


def solve_weighted(
    part: Linear, moments: Moments, width: int, options: Options, *, moment: str = "", weigh: Weigh | None = None
) -> Factored:
    """The truncated SVD of L W, L undone again; of a Gram, L is a root.               [math.md L-2, L-3]"""
    # The root comes from an eigendecomposition, which is SVD-LLM V2's own choice. Any other root, SVD-LLM's Cholesky
    # factor among them, gives the same product where it exists.
    L, clipped = None, 0.0
    if weigh is not None:
        L = weigh(need(moments, _filled(moment, part.name)))
    elif moment:
        root = factor(need(moments, _filled(moment, part.name)))
        L, clipped = root.root, root.clipped
    best = low_rank(part.W, width, L)
    return _factored(part, best.A, best.B.unsqueeze(0), loss=best.loss, total=best.total, clipped=clipped)


def solve_sequential(part: Linear, moments: Moments, width: int, options: Options) -> Factored:
    """SVD-LLM, then B again by least squares on what the layers cut so far really feed.     [math.md L-5]"""
    # The refit pulls towards the B it starts from, so that directions the narrow stream never shows keep it.
    source = INPUTS[part.name]
    root = factor(need(moments, f"{source}_gram"))
    best = low_rank(part.W, width, root.root)
    W = part.W.to(SOLVE_DTYPE)
    gram = need(moments, f"narrow_{source}_gram").to(SOLVE_DTYPE)  # (in, in)
    target = gram @ W
    problem = Regression(gram=gram, cross=target, energy=(W * target).sum(), tokens=1.0)
    B = ridge(problem.mapped(best.A), best.B, REFIT_RIDGE)
    error = W - best.A @ B
    loss = max(0.0, (error * (gram @ error)).sum().item())
    return _factored(part, best.A, B.unsqueeze(0), loss=loss, total=problem.energy.item(), clipped=root.clipped)


def solve_group_heads(part: Linear, moments: Moments, width: int, options: Options) -> Factored:
    """A whitened SVD for each group of heads by itself.                                     [math.md L-6]"""
    root = factor(need(moments, "x_gram"))
    W = part.W.unflatten(-1, (head_groups(part.heads), -1)).movedim(1, 0)  # (in, out) -> (g, in, s d)
    best = [low_rank(columns, width, root.root) for columns in W]
    A, B = torch.cat([group.A for group in best], dim=1), torch.stack([group.B for group in best])
    loss, total = sum(group.loss for group in best), sum(group.total for group in best)
    return replace(_factored(part, A, B, loss=loss, total=total, clipped=root.clipped), cached=True)


def _factored(part: Linear, A: Tensor, B: Tensor, **outcome: Any) -> Factored:
    """The solution A (in, g r), B (g, r, out / g) in the part's own dtype."""
    return Factored(name=part.name, A=fold.like(part.W, A), B=fold.like(part.W, B), b=part.b, **outcome)


Choose = Callable[[Tensor, int], Tensor]
"""(scores (in, out), weights kept per output) -> which stay, (in, out) of bool."""


def solve_mask(part: Linear, moments: Moments, width: int, options: Options, *, choose: Choose) -> Masked:
    """Keep the largest |W_ij| |x_i|, compared within each output.                            [math.md L-9]"""
    # Loss and total take inputs as uncorrelated: they are exact for a diagonal second moment only.
    loudness = need(moments, f"{INPUTS[part.name]}_energy").sqrt()  # (in,)
    scores = loudness.unsqueeze(-1) * part.W.to(SOLVE_DTYPE).abs()
    stay = choose(scores, width)
    energy = scores.square()
    W = part.W.masked_fill(~stay.to(part.W.device), 0.0)
    loss, total = energy.masked_fill(stay, 0.0).sum().item(), energy.sum().item()
    return Masked(name=part.name, W=W, loss=loss, total=total)


def largest(scores: Tensor, keep: int) -> Tensor:
    """The `keep` largest of every column; equal scores keep the lower index."""
    order = scores.argsort(dim=-2, descending=True, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-2, order[..., :keep, :], True)


def n_of_m(scores: Tensor, keep: int, *, n: int, m: int) -> Tensor:
    """The n largest of every m inputs in a row, column by column; `keep` is what that comes to."""
    # The last inputs may be fewer than m and still keep n: no block ever holds more.
    padded = torch.nn.functional.pad(scores, (0, 0, 0, -len(scores) % m), value=-1.0)
    return largest(padded.unflatten(0, (-1, m)), n).flatten(0, 1)[: len(scores)]


def _filled(moment: str, linear: str) -> str:
    """The name of a moment with {map} and {input} filled in for one linear map."""
    return moment.format(map=linear, input=INPUTS[linear])


def _every_map(solver: Solver, moment: str) -> dict[str, Any]:
    """The same solver for all linear maps, which reads one moment of each."""
    names = {linear: _filled(moment, linear) for linear in INPUTS}
    return {"solvers": dict.fromkeys(INPUTS, solver), "reads": reads(**names)}


def _svd(name: str, summary: str, moment: str = "", weigh: Weigh | None = None, **settings: Any) -> LinearMethod:
    solved = _every_map(partial(solve_weighted, moment=moment, weigh=weigh), moment)
    return LinearMethod(**{"name": name, "summary": summary, "rank": equal_parameters_rank, **solved, **settings})


def _mask(name: str, summary: str, choose: Choose, ratio: float | None = None) -> MaskMethod:
    solved = _every_map(partial(solve_mask, choose=choose), "{input}_energy")
    return MaskMethod(name=name, summary=summary, rank=kept_per_output, ratio=ratio, **solved)


# h = query heads, k = key heads, d = head width, P = rotation pairs, p = pairs kept, s = unrotated channels


def solve_qk(part: QK, moments: Moments, width: int, options: Options, *, by_input: bool) -> Shrunk:
    """Pairs of rotated channels and single unrotated ones, by query size times key size.     [math.md L-8]"""
    x = need(moments, "x_energy").sqrt() if by_input else None  # (D,)
    q = sum_groups(channel_sizes(part.W_q, part.b_q, part.norm_q, x), part.group)  # (h, d) -> (k, d)
    k = channel_sizes(part.W_k, part.b_k, part.norm_k, x)
    rest = Channels(values=(q * k)[:, 2 * part.num_pairs :])  # (k, s)
    return a3.keep_pairs(part, pair_scores(q, k, part.num_pairs), rest, moments, width, options)


def solve_mlp(part: MLP, moments: Moments, width: int, options: Options, *, by_input: bool) -> Shrunk:
    """Neurons by their rows of the down projection, as in A3's own problem.                  [math.md L-8]"""
    scores = part.W_down.to(SOLVE_DTYPE).abs().sum(dim=-1)  # (I,)
    scores = need(moments, "down_energy").sqrt() * scores if by_input else scores
    kept, lost = top(scores, width)
    return Shrunk(part=fold.keep_neurons(part, kept), loss=lost.item(), total=scores.sum().item())


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


def _selection(name: str, summary: str, *, by_input: bool) -> ComponentMethod:
    x, down = ("x_energy", "down_energy") if by_input else ("", "")
    return ComponentMethod(
        name=name,
        summary=summary,
        solvers={"qk": partial(solve_qk, by_input=by_input), "mlp": partial(solve_mlp, by_input=by_input)},
        # The squares are only there, and only read, where a norm stands between projection and rotation.
        reads=reads(qk=f"q_squares k_squares {x}", mlp=down),
    )


SVD = _svd("svd", "Baseline: truncated SVD of every linear map.")
# The root of the information of all weights behind an input.
FWSVD = _svd("fwsvd", "Baseline: SVD with rows weighted by Fisher information.", "{map}_fisher", torch.sqrt)
ASVD = _svd(
    "asvd",
    "Baseline: SVD with inputs scaled by their mean magnitude, ranks by sensitivity.",
    "{input}_abs",
    lambda magnitude: magnitude.pow(ASVD_ALPHA),
    search="sensitivity",
    allocate="search",
)
SVD_LLM = _svd("svd-llm", "Baseline: SVD of whitened linear maps, the optimum for each of them alone.", "{input}_gram")
SVD_LLM_SEQUENTIAL = _svd(
    "svd-llm-sequential",
    "Baseline: SVD-LLM with its closed-form update on the narrow model's inputs.",
    "{input}_gram",
    solvers=dict.fromkeys(INPUTS, solve_sequential),
    streams="both",
)
SVD_LLM_V2 = replace(
    SVD_LLM,
    name="svd-llm-v2",
    summary="Baseline: SVD-LLM's optimum with ranks by each map's truncation loss.",
    search="loss",
    allocate="search",
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
WANDA_SPARSE = _mask("wanda-sparse", "Baseline: Wanda's unstructured zeros; shapes and speed stay.", largest)
WANDA_2_4 = _mask("wanda-2:4", "Baseline: Wanda, two zeros in every four.", partial(n_of_m, n=2, m=4), 0.5)
WANDA_4_8 = _mask("wanda-4:8", "Baseline: Wanda, four zeros in every eight.", partial(n_of_m, n=4, m=8), 0.5)
MAGNITUDE = _selection(
    "magnitude", "Baseline: pairs and neurons with the largest weights, the paper's abs(w).", by_input=False
)
WANDA = _selection("wanda", "Baseline: pairs and neurons by weight size times input loudness.", by_input=True)
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
    mixture=experts.drop_experts,
)
BASELINES = (
    *(CLOVER, PALU, SVD, FWSVD, ASVD, SVD_LLM, SVD_LLM_SEQUENTIAL, SVD_LLM_V2),
    *(REAP, MAGNITUDE, WANDA, WANDA_SPARSE, WANDA_2_4, WANDA_4_8),
)
