"""What A3's solvers are held against: the paper's formulas, spelt out at full size.   [math.md, sections 2-5]

The reference is what the paper prints: symmetric roots of (d_model x d_model) autocorrelations, their
inverses, and the SVD of the whitened fused weights, in float64. The solvers see moments of the narrow
quantities only. Both are compared where the objective looks, on scores and outputs of the calibration
tokens relative to the dense ones, because weights that no token can tell apart may differ freely.
Biases enter the reference as the paper's formulas allow: a constant channel appended to the input.

h = query heads, k = key/value heads, g = h / k, t = tokens, D = d_model, d = head width, r = new width
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from a3_problems import QKProblem, project
from hypothesis import assume
from torch import Tensor

from trisect.records.parts import OV, QK, Shrunk

# -- the paper's formulas --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Root:
    """The symmetric root of an autocorrelation and its inverse."""

    root: Tensor
    inverse: Tensor


def root_of(X: Tensor) -> Root:
    """R^(1/2) of R = X^T X / t. From the SVD of X: forming R first would cost half of the digits."""
    _, s, Vh = torch.linalg.svd(X / X.shape[0] ** 0.5, full_matrices=False)
    return Root(root=Vh.mT * s @ Vh, inverse=Vh.mT / s @ Vh)


def identity_root(X: Tensor) -> Root:
    """What the ablations put in a root's place."""
    eye = torch.eye(X.shape[1], dtype=X.dtype)
    return Root(root=eye, inverse=eye)


QK_METHODS = {"a3": (root_of, root_of), "a3-q-only": (root_of, identity_root), "a3-k-only": (identity_root, root_of)}


def with_one(X: Tensor, b: Tensor | None) -> Tensor:
    """[x, 1] where there is a bias to multiply the 1 with."""
    return X if b is None else torch.cat([X, torch.ones_like(X[..., :1])], dim=-1)


def with_row(W: Tensor, b: Tensor | None) -> Tensor:
    """[W; b]."""
    return W if b is None else torch.cat([W, b.unsqueeze(-2)], dim=-2)


def truncated(M: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """SVD_r(M) and all singular values; unless float64 can tell the rank-r part from the rest, give up.

    Mixing slots r and r + 1 by the rounding of the squared problem changes M by this share of |M|.
    """
    U, s, Vh = torch.linalg.svd(M, full_matrices=False)
    if 0 < rank < len(s) and s[rank] > 0:
        eps = torch.finfo(M.dtype).eps
        assume(eps * s[0] * s[rank - 1] < 1e-10 * (s[rank - 1] ** 2 - s[rank] ** 2))
    return U[:, :rank] * s[:rank] @ Vh[:rank], s


def groups(x: Tensor, group: int) -> Tensor:
    """(h, ...) -> (k, g, ...)."""
    return x.unflatten(0, (-1, group))


def fused_qk(part: QK) -> Tensor:
    """W_qk,i = W_q,i W_k^T (h, D, D), biases as one more row and column."""
    W_q, W_k = with_row(part.W_q, part.b_q), with_row(part.W_k, part.b_k)
    return W_q @ W_k.repeat_interleave(part.group, dim=0).mT


def fused_vo(part: OV) -> Tensor:
    """W_vo,i = W_v W_o,i (h, D, D), the value bias as one more row."""
    return with_row(part.W_v, part.b_v).repeat_interleave(part.group, dim=0) @ part.W_o


def paper_qk(W_qk: Tensor, R_q: Root, R_k: Root, *, group: int, rank: int) -> tuple[Tensor, float]:
    """Theorem 3.2 for group = 1, the joint SVD of section 3.4 otherwise: approximations and loss."""
    approximations, loss = [], 0.0
    for W in groups(W_qk, group):
        stacked, s = truncated((R_q.root @ W @ R_k.root).flatten(0, 1), rank)
        approximations.append(R_q.inverse @ stacked.unflatten(0, (group, -1)) @ R_k.inverse)
        loss += s[rank:].square().sum().item()
    return torch.cat(approximations), loss


def paper_vo(W_vo: Tensor, roots: list[Root], *, group: int, rank: int) -> tuple[Tensor, float]:
    """Theorem 3.3 for group = 1, the appendix's joint SVD otherwise; one root per value head."""
    approximations, loss = [], 0.0
    for W, R in zip(groups(W_vo, group), roots, strict=True):
        D = W.shape[-1]
        side_by_side, s = truncated(torch.cat(list(R.root @ W), dim=1), rank)
        approximations.append(torch.stack((R.inverse @ side_by_side).split(D, dim=1)))
        loss += s[rank:].square().sum().item()
    return torch.cat(approximations), loss


def paper_channel_scores(problem: QKProblem, R_q: Root, R_k: Root) -> Tensor:
    """(k, d): |L_:i|^2 |R_i:|^2 with L = R_q^(1/2) W_q stacked over the group, R = W_k^T R_k^(1/2)."""
    part = problem.part
    L = groups(R_q.root @ with_row(part.W_q, part.b_q), part.group).flatten(1, 2)
    R = with_row(part.W_k, part.b_k).mT @ R_k.root
    return L.square().sum(dim=1) * R.square().sum(dim=2)


# -- measured on tokens ----------------------------------------------------------------------------------


def qk_scores(part: QK, X_q: Tensor, X_k: Tensor) -> Tensor:
    """(h, t, t') before the scale and the softmax, as a model computes them."""
    q = project(X_q, part.W_q, part.b_q)
    k = project(X_k, part.W_k, part.b_k).repeat_interleave(part.group, dim=0)
    return q @ k.mT


def mean_score_error(dense: Tensor, narrow: Tensor) -> float:
    return (dense - narrow).square().mean(dim=(1, 2)).sum().item()


def mean_output_error(dense: Tensor, narrow: Tensor) -> float:
    """(heads, t, D): squared error per token, summed over channels and heads."""
    return (dense - narrow).square().sum(dim=-1).mean(dim=-1).sum().item()


# -- comparisons -----------------------------------------------------------------------------------------


def assert_same(actual: Tensor, expected: Tensor, *, dense: Tensor, tolerance: float = 1e-8) -> None:
    """Per head, relative to what the dense head computes."""
    error = (actual - expected).flatten(1).norm(dim=1) / dense.flatten(1).norm(dim=1)
    assert error.max() <= tolerance, f"relative errors by head: {error.tolist()}"


def resolved(solution: Shrunk) -> float:
    """How closely outputs must agree. Energy below the floor of 1e-13 is an amplitude of 1e-6.5."""
    return 1e-8 if solution.clipped == 0 else 1e-6


def near(expected: float, total: float) -> Any:
    """Equal to eight digits, or as far as float64 resolves shares of the total."""
    return pytest.approx(expected, rel=1e-8, abs=1e-12 * total)


def check_curve(solutions: list[Shrunk]) -> None:
    losses = [solution.loss for solution in solutions]
    total = solutions[0].total
    for wide, narrow in zip(losses[1:], losses, strict=False):
        assert wide <= narrow + 1e-12 * total
    assert losses[-1] <= 1e-12 * total
    assert all(0 <= solution.loss <= solution.total * (1 + 1e-12) for solution in solutions)
