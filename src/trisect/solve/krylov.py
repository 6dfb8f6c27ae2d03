"""Least squares over millions of weights, in the few directions that explain most of what is missing."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# D = inputs, N = outputs of all maps that read them, K = directions

DAMPING = 1e-3  # of the mean energy, added to inputs and to outputs: silent ones have no inverse


@dataclass(frozen=True, kw_only=True)
class Metric:
    """<u, v> = sum over columns of  b u^T A v  for weights (D, N)."""

    inputs: Tensor  # (D, D) A
    outputs: Tensor  # (N,) b

    @classmethod
    def damped(cls, inputs: Tensor, outputs: Tensor) -> "Metric":
        """With an inverse, whatever the moments are."""
        eye = torch.eye(len(inputs), dtype=inputs.dtype, device=inputs.device)
        return cls(inputs=inputs + _floor(inputs.diagonal()) * eye, outputs=outputs + _floor(outputs))

    def lower(self, v: Tensor) -> Tensor:
        """M v."""
        return self.inputs @ v * self.outputs

    def raiser(self) -> Callable[[Tensor], Tensor]:
        """w -> M^-1 w."""
        root = torch.linalg.cholesky(self.inputs)
        return lambda w: torch.cholesky_solve(w / self.outputs, root)


def _floor(energies: Tensor) -> Tensor:
    # The least number is for models that are silent altogether.
    return DAMPING * energies.mean() + torch.finfo(energies.dtype).tiny ** 0.5


@dataclass(frozen=True, kw_only=True)
class Directions:
    """Directions and the least-squares problem in their coefficients."""

    vectors: Tensor  # (K, D, N)
    gram: Tensor  # (K, K) of J v
    cross: Tensor  # (K,) of J v with what is missing
    penalty: Tensor  # (K, K) of v in the metric


def krylov(right: Tensor, product: Callable[[Tensor], Tensor], metric: Metric, count: int) -> Directions:
    """The first `count` directions M^-1 b, (M^-1 J^T J) M^-1 b, ... of  min |J v - r|^2,  b = J^T r.   [math.md F-8]

    `right` (D, N) is b and `product` is v -> J^T J v. Conjugate gradients look for their answer in the same
    space; with the space at hand every ridge is a system of `count` unknowns. Directions are orthonormal in the
    metric up to rounding, and fewer where the space ends.
    """
    raised, w, scale = metric.raiser(), right, None
    vectors: list[Tensor] = []
    pushed: list[Tensor] = []
    for _ in range(count):
        v = raised(w)
        for _ in range(2):  # once more: rounding brings old directions back
            low = metric.lower(v)
            for old in vectors:
                v = v - (old * low).sum() * old
        size = (v * metric.lower(v)).sum().clamp(min=0).sqrt()
        scale = size if scale is None else scale
        if not size > 1e-7 * scale:
            break
        vectors.append(v / size)
        w = product(vectors[-1])
        pushed.append(w)
    found = (vectors, pushed, [metric.lower(v) for v in vectors])
    V, W, lowered = (torch.stack(each) if each else right.new_zeros(0, *right.shape) for each in found)
    rows = V.flatten(1)
    gram = rows @ W.flatten(1).mT
    return Directions(
        vectors=V, gram=(gram + gram.mT) / 2, cross=rows @ right.flatten(), penalty=rows @ lowered.flatten(1).mT
    )
