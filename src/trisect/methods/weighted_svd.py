"""Weighted SVDs of single linear maps: SVD, FWSVD, ASVD, SVD-LLM and its two followers.   docs/math.md, 10

They share one problem and one solver (solve/lowrank.py) and differ in what an error at each input counts.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import floor
from typing import Any

from torch import Tensor

from trisect.methods.fold import like
from trisect.methods.method import LinearMethod, Options, Solver, need, reads
from trisect.records.parts import INPUTS, Factored, Linear, Moments
from trisect.solve.lowrank import SOLVE_DTYPE, InputWeight, diagonal_weight, gram_weight, low_rank
from trisect.solve.ridge import Regression, ridge

ASVD_ALPHA = 0.5  # the exponent of ASVD's paper

REFIT_RIDGE = 1e-6  # above the rounding of Grams whose batches are summed in float32; far below what moves a loss

Weigh = Callable[[Linear, Moments], InputWeight | None]


def equal_parameters_rank(inputs: int, outputs: int, heads: int, ratio: float) -> int:
    """The rank whose two factors hold (1 - ratio) of the parameters.                       [math.md L-4]"""
    # 1 - 0.9 is not 0.1 in binary; nine digits keep such dust from costing a rank.
    return max(1, floor(round((1 - ratio) * inputs * outputs / (inputs + outputs), 9)))


def solve_weighted(part: Linear, moments: Moments, width: int, options: Options, *, weigh: Weigh) -> Factored:
    """The truncated SVD of L W, L undone again.                                      [math.md L-2, L-3]"""
    best = low_rank(part.W, width, weigh(part, moments))
    return factored(part, best.A, best.B, loss=best.loss, total=best.total, clipped=best.clipped)


def solve_sequential(part: Linear, moments: Moments, width: int, options: Options) -> Factored:
    """SVD-LLM, then B again by least squares on what the layers cut so far really feed.     [math.md L-5]"""
    # The refit pulls towards the B it starts from, so that directions the narrow stream never shows keep it.
    source = INPUTS[part.name]
    best = low_rank(part.W, width, gram_weight(need(moments, f"{source}_gram")))
    W = part.W.to(SOLVE_DTYPE)
    gram = need(moments, f"narrow_{source}_gram").to(SOLVE_DTYPE)  # (in, in)
    target = gram @ W
    problem = Regression(gram=gram, cross=target, energy=(W * target).sum(), tokens=1.0)
    B = ridge(problem.mapped(best.A), best.B, REFIT_RIDGE)
    error = W - best.A @ B
    return factored(
        part,
        best.A,
        B,
        loss=max(0.0, (error * (gram @ error)).sum().item()),
        total=problem.energy.item(),
        clipped=best.clipped,
    )


def factored(part: Linear, A: Tensor, B: Tensor, *, loss: float, total: float, clipped: float) -> Factored:
    """The solution in the part's own dtype; B (r, out) is one group."""
    return Factored(
        name=part.name,
        A=like(part.W, A),
        B=like(part.W, B.unsqueeze(0)),
        b=part.b,
        loss=loss,
        total=total,
        clipped=clipped,
    )


# -- what an error counts ----------------------------------------------------------------------------------


def unweighted(part: Linear, moments: Moments) -> None:
    """L = I."""
    return None


def fisher_weight(part: Linear, moments: Moments) -> InputWeight:
    """FWSVD: the root of the Fisher information of all weights behind an input."""
    return diagonal_weight(need(moments, f"{part.name}_fisher").sqrt())  # (in,)


def magnitude_weight(part: Linear, moments: Moments) -> InputWeight:
    """ASVD: the input's mean magnitude to the power alpha."""
    return diagonal_weight(need(moments, f"{INPUTS[part.name]}_abs").pow(ASVD_ALPHA))  # (in,)


def whitening(part: Linear, moments: Moments) -> InputWeight:
    """SVD-LLM: a root of the inputs' second moment; heads side by side before the output projection."""
    # The root comes from an eigendecomposition, which is SVD-LLM V2's own choice. Any other root, SVD-LLM's
    # Cholesky factor among them, gives the same product where it exists.
    return gram_weight(need(moments, f"{INPUTS[part.name]}_gram"))  # (in, in)


# -- the methods -------------------------------------------------------------------------------------------


def _method(name: str, summary: str, solver: Solver, moment: str = "", **settings: Any) -> LinearMethod:
    """A method that reads one moment for every map: its name with {map} and {input} filled in."""
    names = {linear: moment.format(map=linear, input=source) for linear, source in INPUTS.items()}
    return LinearMethod(
        name=name,
        summary=summary,
        solvers=dict.fromkeys(INPUTS, solver),
        reads=reads(**names),
        rank=equal_parameters_rank,
        **settings,
    )


SVD = _method("svd", "Baseline: truncated SVD of every linear map.", partial(solve_weighted, weigh=unweighted))
FWSVD = _method(
    "fwsvd",
    "Baseline: SVD with rows weighted by Fisher information.",
    partial(solve_weighted, weigh=fisher_weight),
    "{map}_fisher",
)
ASVD = _method(
    "asvd",
    "Baseline: SVD with inputs scaled by their mean magnitude, ranks by sensitivity.",
    partial(solve_weighted, weigh=magnitude_weight),
    "{input}_abs",
    search="sensitivity",
    allocate="search",
)
SVD_LLM = _method(
    "svd-llm",
    "Baseline: SVD of whitened linear maps, the optimum for each of them alone.",
    partial(solve_weighted, weigh=whitening),
    "{input}_gram",
)
SVD_LLM_SEQUENTIAL = _method(
    "svd-llm-sequential",
    "Baseline: SVD-LLM with its closed-form update on the narrow model's inputs.",
    solve_sequential,
    "{input}_gram",
    streams="both",
)
SVD_LLM_V2 = replace(
    SVD_LLM,
    name="svd-llm-v2",
    summary="Baseline: SVD-LLM's optimum with ranks by each map's truncation loss.",
    search="loss",
    allocate="search",
)
