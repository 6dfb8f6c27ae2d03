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
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(self.inputs))
        return lambda w: inverse @ (w / self.outputs)


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


def krylov(
    right: Tensor, product: Callable[[Tensor], Tensor], metric: Metric, count: int, *, kept: torch.dtype | None = None
) -> Directions:
    """The first `count` directions M^-1 b, (M^-1 J^T J) M^-1 b, ... of  min |J v - r|^2,  b = J^T r.   [math.md F-8]

    `right` (D, N) is b and `product` is v -> J^T J v. Conjugate gradients look for their answer in the same
    space; with the space at hand every ridge is a system of `count` unknowns. Directions are orthonormal in the
    metric up to rounding, stored as `kept` (else as `right` is), and fewer where the space ends.
    """
    raised, w, scale, n = metric.raiser(), right, None, 0
    V = right.new_empty(count, *right.shape, dtype=kept)
    gram, penalty = right.new_zeros(2, count, count)
    while n < count:
        v = raised(w)
        v = _without(v, V[:n], _dots(V[:n], w))  # w is M v
        # Once more, as rounding brings old directions back; what that does to sizes follows from them.
        low = metric.lower(v)
        back = _dots(V[:n], low)
        v, P = _without(v, V[:n], back), penalty[:n, :n]
        size = ((v * low).sum() - back.square().sum() + back @ P @ back).clamp(min=0).sqrt()
        scale = size if scale is None else scale
        if not size > 1e-7 * scale:
            break
        V[n] = v.div_(size)
        del v, low
        penalty[n, :n] = penalty[:n, n] = (back - P @ back) / size
        penalty[n, n] = 1.0
        w = product(V[n])
        gram[n, : n + 1] = gram[: n + 1, n] = _dots(V[: n + 1], w)
        n += 1
    V = V[:n]
    return Directions(vectors=V, gram=gram[:n, :n], cross=_dots(V, right), penalty=penalty[:n, :n])


def _dots(V: Tensor, w: Tensor) -> Tensor:
    """Inner products (n,), one direction at a time: all at once would be a copy of all."""
    return torch.stack([(v * w).sum() for v in V]) if len(V) else w.new_zeros(0)


def _without(v: Tensor, V: Tensor, steps: Tensor) -> Tensor:
    for old, step in zip(V, steps, strict=True):
        v = v.sub_(step * old)
    return v
