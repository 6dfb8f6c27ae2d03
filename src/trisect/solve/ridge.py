"""Least squares with a prior: refit what follows a cut, no further than the data can carry.

    min_W  E |x W - y|^2 + strength * sum_i E[x_i^2] |w_i - w0_i|^2                          [math.md F-1]

The penalty is in each feature's own unit, so that one strength suits loud and quiet channels, and pulls
towards the weights the cut left behind: with too few tokens the answer is those weights, not zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Strengths tried on held-out tokens, from "trust the data" to "keep the prior".
STRENGTHS = (1e-4, 1e-2, 1e-1, 3e-1, 1.0, 10.0, 1e4)

# Features this much quieter than the mean are silent: their weights stay at the prior.
SILENCE = 1e-14

# Added to the unit diagonal: exactly dependent features would make the system singular.
DEPENDENCE = 1e-10


@dataclass(frozen=True, kw_only=True)
class Regression:
    """Second moments of a regression problem over some tokens."""

    gram: Tensor  # (n, n) E[x^T x]
    cross: Tensor  # (n, D) E[x^T y]
    energy: Tensor  # () E|y|^2
    tokens: float

    def mapped(self, features: Tensor) -> "Regression":
        """The same problem in the features x -> x `features`, (n, m)."""
        gram = features.mT @ self.gram @ features
        return Regression(gram=gram, cross=features.mT @ self.cross, energy=self.energy, tokens=self.tokens)

    def chosen(self, index: Tensor) -> "Regression":
        """The same problem with some features only."""
        gram = self.gram.index_select(0, index).index_select(1, index)
        return Regression(gram=gram, cross=self.cross[index], energy=self.energy, tokens=self.tokens)

    def error(self, W: Tensor) -> Tensor:
        """E|x W - y|^2."""
        return self.energy - 2 * (W * self.cross).sum() + (W * (self.gram @ W)).sum()

    def joined(self, other: "Regression") -> "Regression":
        """Both sets of tokens together."""
        n = self.tokens + other.tokens
        a, b = self.tokens / n, other.tokens / n
        return Regression(
            gram=a * self.gram + b * other.gram,
            cross=a * self.cross + b * other.cross,
            energy=a * self.energy + b * other.energy,
            tokens=n,
        )


def ridge(problem: Regression, prior: Tensor, strength: float) -> Tensor:
    """The weights (n, D) for one strength of the prior."""
    scale = unit_scale(problem.gram)
    system = scale.unsqueeze(-1) * problem.gram * scale
    system.diagonal().add_(strength + DEPENDENCE)
    gap = problem.cross - problem.gram @ prior  # what the prior leaves unexplained, (n, D)
    return prior + scale.unsqueeze(-1) * _solve_positive(system, scale.unsqueeze(-1) * gap)


def _solve_positive(system: Tensor, right: Tensor) -> Tensor:
    """Cholesky, half the work of a general solver; that one steps in where rounding left no positive root."""
    root, failed = torch.linalg.cholesky_ex(system)
    return torch.linalg.solve(system, right) if failed else torch.cholesky_solve(right, root)


def unit_scale(gram: Tensor) -> Tensor:
    """Factors that bring a Gram to a unit diagonal: features of different loudness then cost no digits."""
    energy = gram.diagonal()
    quiet = SILENCE * energy.clamp(min=0).mean().clamp(min=torch.finfo(energy.dtype).tiny)
    # Rounding can leave a silent mapped feature slightly below zero.
    return (energy.clamp(min=0) + quiet).rsqrt()


def held_out_ridge(fit: Regression, held: Regression, prior: Tensor) -> tuple[Tensor, float]:
    """Weights from all tokens, with the strength that did best on the held-out ones.      [math.md F-2]"""
    errors = [held.error(ridge(fit, prior, strength)).item() for strength in STRENGTHS]
    best = STRENGTHS[min(range(len(errors)), key=errors.__getitem__)]
    return ridge(fit.joined(held), prior, best), best
