"""Least squares with a prior: refit what follows a cut, no further than the data can carry.

    min_W  E |x W - y|^2 + strength * tr (W - W0)^T P (W - W0)                               [math.md F-1]

The penalty P is in the features' own units, so that one strength suits loud and quiet channels, and pulls
towards the weights the cut left behind: with too few tokens the answer is those weights, not zero. Left out,
P is the diagonal of the Gram.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Strengths tried on held-out tokens, from "trust the data" to "keep the prior".
STRENGTHS = (1e-4, 1e-2, 1e-1, 3e-1, 1.0, 10.0, 1e4)

# Features this much quieter than the mean are silent: their weights stay at the prior.
SILENCE = 1e-14

# Added to the unit diagonal: exactly dependent features would make the system singular.
DEPENDENCE = 1e-10

# Strengths whose held-out errors differ by less than this share are as good as each other.
TIE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Regression:
    """Second moments of a regression problem over some tokens.

    A very wide Gram comes in float32 and in main memory, wherever the rest is; `whole`, `chosen`, `mapped`
    and `joined` bring it beside the rest in float64, and only then is there something to solve.
    """

    gram: Tensor  # (n, n) E[x^T x]
    cross: Tensor  # (n, D) E[x^T y]
    energy: Tensor  # () E|y|^2
    tokens: float
    penalty: Tensor | None = None  # (n, n) P; None is the Gram's diagonal

    def whole(self) -> "Regression":
        """The same problem, ready to be solved."""
        return replace(self, gram=self._fetched())

    def _fetched(self, *, copy: bool = False) -> Tensor:
        """The Gram beside the rest: moved first and lengthened there, where it is fast."""
        return self.gram.to(self.cross.device).to(self.cross.dtype, copy=copy)

    def mapped(self, features: Tensor) -> "Regression":
        """The same problem in the features x -> x `features`, (n, m)."""
        gram = features.mT @ self._fetched() @ features
        penalty = None if self.penalty is None else features.mT @ self.penalty @ features
        return replace(self, gram=gram, cross=features.mT @ self.cross, penalty=penalty)

    def chosen(self, index: Tensor) -> "Regression":
        """The same problem with some features only."""
        gram = self.gram.to(index.device).index_select(0, index).index_select(1, index)
        return replace(self, gram=gram.to(self.cross), cross=self.cross[index])

    def error(self, W: Tensor) -> Tensor:
        """E|x W - y|^2."""
        return self.energy - 2 * (W * self.cross).sum() + (W * (self.gram @ W)).sum()

    def energies(self, other: "Regression") -> Tensor:
        """E[x_i^2] (n,) over both sets of tokens."""
        mine, theirs = (problem.gram.diagonal().to(self.cross) for problem in (self, other))
        return (self.tokens * mine + other.tokens * theirs) / (self.tokens + other.tokens)

    def joined(self, other: "Regression") -> "Regression":
        """Both sets of tokens together; the Gram is a new one, which its user may overwrite."""
        n = self.tokens + other.tokens
        a, b = self.tokens / n, other.tokens / n
        return Regression(
            gram=self._fetched(copy=True).mul_(a).add_(other.gram.to(self.cross.device), alpha=b),
            cross=a * self.cross + b * other.cross,
            energy=a * self.energy + b * other.energy,
            tokens=n,
            penalty=self.penalty,
        )


def ridge(problem: Regression, prior: Tensor, strength: float, *, overwrite: bool = False) -> Tensor:
    """The weights (n, D) for one strength of the prior; with `overwrite`, in the place of the Gram."""
    gap = (problem.gram @ prior).neg_().add_(problem.cross)  # what the prior leaves unexplained, (n, D)
    if problem.penalty is None:
        system, scale = unit_system(problem.gram, strength, overwrite=overwrite)
    else:
        system, scale = unit_system(problem.gram + strength * problem.penalty, 0.0, overwrite=True)
    change = _solve_positive(system, gap.mul_(scale.unsqueeze(-1)))
    return change.mul_(scale.unsqueeze(-1)).add_(prior)


def unit_system(gram: Tensor, strength: float, *, overwrite: bool = False) -> tuple[Tensor, Tensor]:
    """The Gram at a unit diagonal with a ridge on it, and the factors (n,) that brought it there."""
    scale = unit_scale(gram)
    system = gram if overwrite else gram.clone()
    system.mul_(scale.unsqueeze(-1)).mul_(scale)
    system.diagonal().add_(strength + DEPENDENCE)
    return system, scale


def _solve_positive(system: Tensor, right: Tensor) -> Tensor:
    """Cholesky in the place of `right`; a general solver where rounding left no positive root."""
    root, failed = torch.linalg.cholesky_ex(system)
    if failed:
        return torch.linalg.solve(system, right)
    # Two triangular systems: `cholesky_solve` would copy the root.
    torch.linalg.solve_triangular(root, right, upper=False, out=right)
    torch.linalg.solve_triangular(root.mT, right, upper=True, out=right)
    return right


def inverse_positive(system: Tensor) -> Tensor:
    """The inverse, with one more matrix of its size and no third: `system` is overwritten on the way."""
    root, failed = torch.linalg.cholesky_ex(system)
    if failed:
        return torch.linalg.inv(system)
    system.zero_().fill_diagonal_(1.0)
    torch.linalg.solve_triangular(root, system, upper=False, out=system)
    del root
    return system.mT @ system


def unit_scale(gram: Tensor) -> Tensor:
    """Factors that bring a Gram to a unit diagonal: features of different loudness then cost no digits."""
    energy = gram.diagonal()
    quiet = SILENCE * energy.clamp(min=0).mean().clamp(min=torch.finfo(energy.dtype).tiny)
    # Rounding can leave a silent mapped feature slightly below zero.
    return (energy.clamp(min=0) + quiet).rsqrt()


def held_out_ridge(fit: Regression, held: Regression, prior: Tensor) -> tuple[Tensor, float]:
    """Weights from all tokens, with the strength that did best on the held-out ones.      [math.md F-2]"""
    errors = torch.stack([held.error(ridge(fit, prior, strength)) for strength in STRENGTHS])
    best = steady_choice(errors)
    return ridge(fit.joined(held), prior, best, overwrite=True), best


def steady_choice(errors: Tensor) -> float:
    """The best strength; of several that are as good, their mean in logarithms.

    A mere minimum would jump between them by rounding, and the weights with it.
    """
    least = errors.min()
    shares = ((least - errors) / (TIE * least.abs().clamp(min=torch.finfo(errors.dtype).tiny))).softmax(dim=0)
    strengths = torch.tensor(STRENGTHS, dtype=errors.dtype, device=errors.device)
    return (shares * strengths.log()).sum().exp().item()
