"""Wanda as published: zeros in linear maps that keep their shapes.                        docs/math.md, 10"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from trisect.methods.method import MaskMethod, Method, Options, need, reads
from trisect.records.parts import INPUTS, Linear, Masked, Moments
from trisect.solve.lowrank import SOLVE_DTYPE

Choose = Callable[[Tensor, int], Tensor]
"""(scores (in, out), weights kept per output) -> which stay, (in, out) of bool."""


def kept_per_output(inputs: int, outputs: int, heads: int, ratio: float) -> int:
    """Weights that every output keeps.                                                       [math.md L-9]"""
    return max(1, round(round((1 - ratio) * inputs, 9)))


def solve_mask(part: Linear, moments: Moments, width: int, options: Options, *, choose: Choose) -> Masked:
    """Keep the largest |W_ij| |x_i|, compared within each output.                            [math.md L-9]"""
    # Loss and total take inputs as uncorrelated: they are exact for a diagonal second moment only.
    loudness = need(moments, f"{INPUTS[part.name]}_energy").sqrt()  # (in,)
    scores = loudness.unsqueeze(-1) * part.W.to(SOLVE_DTYPE).abs()
    stay = choose(scores, width)
    energy = scores.square()
    return Masked(
        name=part.name,
        W=part.W.masked_fill(~stay.to(part.W.device), 0.0),
        loss=energy.masked_fill(stay, 0.0).sum().item(),
        total=energy.sum().item(),
    )


def largest(scores: Tensor, keep: int) -> Tensor:
    """The `keep` largest of every column; equal scores keep the lower index."""
    order = scores.argsort(dim=-2, descending=True, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-2, order[..., :keep, :], True)


def n_of_m(scores: Tensor, keep: int, *, n: int, m: int) -> Tensor:
    """The n largest of every m inputs in a row, column by column; `keep` is what that comes to."""
    # The last inputs may be fewer than m and still keep n: no block ever holds more.
    inputs = len(scores)
    blocks = pad(scores, (0, 0, 0, -inputs % m), value=-1.0).unflatten(0, (-1, m))  # (blocks, m, out)
    return largest(blocks, n).flatten(0, 1)[:inputs]


def _mask(name: str, summary: str, choose: Choose, *, ratio: float | None = None) -> Method:
    return MaskMethod(
        name=name,
        summary=summary,
        solvers=dict.fromkeys(INPUTS, partial(solve_mask, choose=choose)),
        reads=reads(**{linear: f"{source}_energy" for linear, source in INPUTS.items()}),
        rank=kept_per_output,
        ratio=ratio,
    )


WANDA_SPARSE = _mask("wanda-sparse", "Baseline: Wanda's unstructured zeros; shapes and speed stay.", largest)
WANDA_2_4 = _mask("wanda-2:4", "Baseline: Wanda, two zeros in every four.", partial(n_of_m, n=2, m=4), ratio=0.5)
WANDA_4_8 = _mask("wanda-4:8", "Baseline: Wanda, four zeros in every eight.", partial(n_of_m, n=4, m=8), ratio=0.5)
