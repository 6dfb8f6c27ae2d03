"""Regressions with a ridge, and backward elimination: what goes is what the rest can stand in for.

The optimal-brain-surgeon step in two forms: rows of a regression (MLP neurons), and small blocks of features
of several regressions at once (rotation pairs, shared by the query heads of a group).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

STRENGTHS = (1e-4, 1e-2, 1e-1, 3e-1, 1.0, 10.0, 1e4)
"""Tried on held-out tokens, from "trust the data" to "keep the prior"."""
SILENCE = 1e-14  # features this much quieter than the mean are silent: their weights stay at the prior
DEPENDENCE = 1e-10  # added to the unit diagonal: exactly dependent features would make the system singular
TIE = 1e-3  # strengths whose held-out errors differ by less than this share are as good as each other
BEYOND = 6  # ties worse than the best: such a strength counts for next to nothing, and so do those behind it
STRIPS = 8  # of a Gram, at most: with so many, little more than half of it is computed
LEAST_STRIP = 256  # columns: narrower products are slower
ROUNDS = 64  # in which neurons go, at most; each pays one rank-m update of the inverse
DAMPING = 1e-3  # of the mean energy, added to inputs and to outputs: silent ones have no inverse


def product(x: Tensor, y: Tensor) -> Tensor:
    """x y in float32, or float64 where either is."""
    # On a GPU numbers of 16 bits are multiplied as they are: their products are exact in float32, where the tensor
    # cores add them up, ten times as fast as float32 would be.
    if torch.float64 in (x.dtype, y.dtype):
        return x.double() @ y.double()
    if x.is_cuda and x.dtype == y.dtype and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, y, out_dtype=torch.float32)
    return x.float() @ y.float()


def products(x: Tensor, y: Tensor, total: Tensor | None = None) -> Tensor:
    """x^T y of rows (n, I) and (n, D), in float64; added to `total`, where there is one."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and y.dtype == torch.float32:
        y = y.to(x.dtype)  # what that takes off single numbers has the mean zero, and averages out over tokens
    found = product(x.mT, y)
    return found.double() if total is None else total.add_(found)


def gram(x: Tensor, total: Tensor | None = None) -> Tensor:
    """x^T x of rows (n, I), in float64; added to `total`, where there is one."""
    # By strips of columns: what is left of the diagonal is what is right of it.
    width = x.shape[-1]
    total = x.new_zeros(width, width, dtype=torch.float64) if total is None else total
    step = max(LEAST_STRIP, -(-width // STRIPS))
    for start in range(0, width, step):
        end = start + step
        total[start:end, start:] += product(x[:, start:end].mT, x[:, start:])
        total[end:, start:end] = total[start:end, end:].mT
    return total


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

    def gap(self, W: Tensor) -> Tensor:
        """What weights leave unexplained, E[x^T (y - x W)], (n, D)."""
        return (self.gram @ W).neg_().add_(self.cross)

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
    return _change(problem, problem.gap(prior), strength, overwrite=overwrite).add_(prior)


def _change(problem: Regression, gap: Tensor, strength: float, *, overwrite: bool = False) -> Tensor:
    """What the weights gain over a prior that leaves `gap` (n, D), in the place of that."""
    if problem.penalty is None:
        system, scale = unit_system(problem.gram, strength, overwrite=overwrite)
    else:
        system, scale = unit_system(problem.gram + strength * problem.penalty, 0.0, overwrite=True)
    return _solve_positive(system, gap.mul_(scale.unsqueeze(-1))).mul_(scale.unsqueeze(-1))


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


SKETCH = 256
"""Random mixtures of the outputs that strengths are compared on, where there are at least twice as many outputs:
what a strength gains is a sum over outputs, of which this many mixtures tell the share to some percent."""


def held_out_ridge(
    fit: Regression, held: Regression, prior: Tensor, *, all_tokens: bool = True
) -> tuple[Tensor, float]:
    """Weights from all tokens, with the strength that did best on the held-out ones.      [math.md F-2]"""
    gap, held_gap = fit.gap(prior), held.gap(prior)
    start = held.energy - (prior * (held.cross + held_gap)).sum()  # the prior's own error
    mix = _mixtures(prior)
    few, held_few = (gap, held_gap) if mix is None else (gap @ mix, held_gap @ mix)
    del held_gap

    def error(strength: float) -> Tensor:
        change = _change(fit, few.clone(), strength)
        return start + ((held.gram @ change).sub_(held_few, alpha=2) * change).sum()

    best = steady_choice(tried(error))
    if not all_tokens:
        return _change(fit, gap, best).add_(prior), best
    del gap
    return ridge(fit.joined(held), prior, best, overwrite=True), best


def _mixtures(W: Tensor) -> Tensor | None:
    """(D, SKETCH), the same for the same D; None where that saves nothing."""
    if W.shape[-1] < 2 * SKETCH:
        return None
    generator = torch.Generator().manual_seed(0)
    return torch.randn(W.shape[-1], SKETCH, generator=generator, dtype=W.dtype).to(W.device) / SKETCH**0.5


def tried(error: Callable[[float], Tensor]) -> dict[float, float]:
    """Errors by strength, from the middle of the list outwards: each side ends where errors have grown for good."""
    # Held-out errors fall and rise once, so most strengths far from the best one need no Cholesky factor.
    middle = len(STRENGTHS) // 2
    found = {STRENGTHS[middle]: error(STRENGTHS[middle]).item()}
    for side in (STRENGTHS[middle + 1 :], STRENGTHS[:middle][::-1]):
        for strength in side:
            found[strength] = error(strength).item()
            least = min(found.values())
            if found[strength] > least + BEYOND * TIE * abs(least):
                break
    return found


def steady_choice(errors: dict[float, float]) -> float:
    """The best strength; of several that are as good, their mean in logarithms."""
    # A mere minimum would jump between them by rounding, and the weights with it.
    found = torch.tensor(list(errors.values()), dtype=torch.float64)
    least = found.min()
    shares = ((least - found) / (TIE * least.abs().clamp(min=torch.finfo(found.dtype).tiny))).softmax(dim=0)
    strengths = torch.tensor(list(errors), dtype=torch.float64)
    return (shares * strengths.log()).sum().exp().item()


def eliminate_rows(
    gram: Tensor, W: Tensor, keep: int, *, ridge: float, rounds: int = ROUNDS, overwrite: bool = False
) -> Tensor:
    """Indices (keep,), ascending, of the rows of W whose loss hurts most after refitting.    [math.md E-1]"""
    # Dropping row i and refitting the others costs |w_i|^2 / H_ii with H the inverse Gram. There are never more than
    # two matrices of that size at a time; with `overwrite` the Gram is one of them.
    gram, scale = unit_system(gram, ridge, overwrite=overwrite)
    H, W = inverse_positive(gram), W / scale.unsqueeze(-1)
    del gram
    index, gone = torch.arange(len(W), device=W.device), torch.zeros(len(W), dtype=torch.bool, device=W.device)
    per_round, left = max(1, -(-(len(W) - keep) // rounds)), len(W)
    failed = torch.zeros((), dtype=torch.int32, device=W.device)
    while left > keep:
        cost = (W.square().sum(dim=-1) / H.diagonal()).masked_fill(gone, torch.inf)
        drop = cost.argsort(stable=True)[: min(per_round, left - keep)]
        rows = H[drop]
        # Looked at once, at the end: a GPU would wait for the host in every round.
        update, info = torch.linalg.solve_ex(rows[:, drop], rows)  # (count, n)
        failed += info.abs()
        W, H = W.addmm_(update.mT, W[drop], alpha=-1.0), H.addmm_(rows.mT, update, alpha=-1.0)
        gone[drop], left = True, left - len(drop)
        # What is gone is zero in H; taking it out costs more than a round, so it waits until it is an eighth.
        if left == keep or len(gone) - left >= len(gone) // 8:
            stay = gone.int().argsort(stable=True)[:left]  # in order
            W, H = W.index_select(0, stay), H.index_select(0, stay)
            H = H.index_select(1, stay)
            index, gone = index[stay], gone[stay]
    if failed:
        raise torch.linalg.LinAlgError("Neurons cannot be eliminated: the inverse Gram lost its definiteness.")
    return index


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Pairs kept per key head, and what each query head multiplies them with."""

    kept: Tensor  # (k, p) ascending
    real: Tensor  # (k, g, p)
    quadrature: Tensor  # (k, g, p)
    loss: Tensor  # (k,)
    total: Tensor  # (k,)

    def spread_over(self, key_heads: int) -> "Pairs":
        """Pairs that all heads chose together, as every key head's own."""
        real, quadrature = (x.reshape(key_heads, -1, x.shape[-1]) for x in (self.real, self.quadrature))
        return replace(self, kept=self.kept.expand(key_heads, -1), real=real, quadrature=quadrature)

    def untouched(self) -> "Pairs":
        """The same pairs, multiplied with nothing."""
        return replace(self, real=torch.ones_like(self.real), quadrature=torch.zeros_like(self.quadrature))

    def judged(self, G: Tensor) -> "Pairs":
        """With what they miss of the scores behind a Gram as their loss: no ridge, and any coefficients."""
        return replace(self, loss=self.error(G).sum(dim=-1))

    def error(self, G: Tensor) -> Tensor:
        """What these pairs miss of the scores behind another Gram (k, g, 2P, 2P): (k, g)."""
        k, g, twice, _ = G.shape
        index = self.kept.unsqueeze(1).expand(k, g, -1)
        gap = torch.zeros(k, g, twice, dtype=G.dtype, device=G.device)
        gap[..., : twice // 2] = -1.0
        gap = gap.scatter_add(-1, index, self.real).scatter_add(-1, index + twice // 2, self.quadrature)
        return (gap.unsqueeze(-2) @ G @ gap.unsqueeze(-1)).squeeze(-1).squeeze(-1)


def eliminate_pairs(G: Tensor, keep: int, *, ridge: float, quadrature: bool = True) -> Pairs:
    """Drop rotation pairs while the kept ones, each times a complex number, stand in.       [math.md E-2]"""
    # `G` (k, g, 2 P, 2 P) is the Gram of every pair's share s of the score and of its quadrature t, [s | t], for the g
    # query heads of k key heads. The sum of all s is regressed on the kept s and t.
    k, g, twice, _ = G.shape
    P, B = twice // 2, 2 if quadrature else 1
    G = G[..., : B * P, : B * P]
    total = G[..., :P, :P].sum(dim=(-3, -2, -1))  # (k,)
    # Not `tiny` itself: a ridge times that has no inverse.
    least_mean = torch.finfo(G.dtype).tiny ** 0.5
    mean = G.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None].clamp(min=least_mean)
    H = torch.linalg.inv(G + ridge * mean * torch.eye(B * P, dtype=G.dtype, device=G.device))
    c = torch.zeros(k, g, B * P, dtype=G.dtype, device=G.device)
    c[..., :P] = 1.0
    ids = torch.arange(P, device=G.device).repeat(k, 1)
    loss = torch.zeros_like(total)
    for n in range(P, keep, -1):
        cost = _block_costs(H, c, n, B)  # (k, n)
        least, gone = cost.min(dim=-1)
        loss = loss + least
        others = torch.arange(n - 1, device=G.device).expand(k, -1)
        stay = others + (others >= gone.unsqueeze(-1))  # (k, n - 1): every index but one, in order
        H, c = _without(H, c, _features(gone.unsqueeze(-1), n, B), _features(stay, n, B))
        ids = ids.gather(-1, stay)
    real = c[..., :keep]
    turned = c[..., keep:] if quadrature else torch.zeros_like(real)
    return Pairs(kept=ids, real=real, quadrature=turned, loss=loss, total=total)


def _block_costs(H: Tensor, c: Tensor, n: int, B: int) -> Tensor:
    """What dropping each pair costs, summed over the group: c_b^T (H_bb)^-1 c_b."""
    blocks = H.unflatten(-1, (B, n)).unflatten(-3, (B, n)).diagonal(dim1=-3, dim2=-1)  # (k, g, B, B, n)
    blocks = blocks.movedim(-1, 2)  # (k, g, n, B, B)
    shares = c.unflatten(-1, (B, n)).mT  # (k, g, n, B)
    solved = torch.linalg.solve(blocks, shares.unsqueeze(-1)).squeeze(-1)
    return (shares * solved).sum(dim=-1).sum(dim=1)


def _features(pairs: Tensor, n: int, B: int) -> Tensor:
    """Feature columns of the given pairs: their s, then their t."""
    return torch.cat([pairs + n * block for block in range(B)], dim=-1)


def _without(H: Tensor, c: Tensor, drop: Tensor, stay: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse Gram and coefficients after the features at `drop` (k, b) are gone."""
    rows = _take(H, drop, -2)  # (k, g, b, n)
    update = torch.linalg.solve(_take(rows, drop, -1), rows)
    c = c - (_take(c.unsqueeze(-2), drop, -1) @ update).squeeze(-2)
    H = H - rows.mT @ update
    return _take(_take(H, stay, -2), stay, -1), _take(c.unsqueeze(-2), stay, -1).squeeze(-2)


def _take(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Gather (k, m) indices along `dim` of (k, g, a, b)."""
    index = index[:, None, :, None] if dim == -2 else index[:, None, None, :]
    shape = list(x.shape)
    shape[dim] = index.shape[dim]
    return x.gather(dim, index.expand(shape))


# Least squares over millions of weights, in the few directions that explain most of what is missing.
# D = inputs, N = outputs of all maps that read them, K = directions


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
        return self.inputs.to(v.dtype) @ v * self.outputs.to(v.dtype)

    def raiser(self) -> Callable[[Tensor], Tensor]:
        """w -> M^-1 w."""
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(self.inputs))
        return lambda w: inverse.to(w.dtype) @ (w / self.outputs.to(w.dtype))


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
    metric up to rounding, found and stored as `kept` (else as `right` is), and fewer where the space ends.
    """
    b = right.to(kept or right.dtype)
    raised, w, scale, n = metric.raiser(), b, None, 0
    V = b.new_empty(count, *b.shape)
    gram, penalty = right.new_zeros(2, count, count)
    while n < count:
        v = raised(w)
        v = _less(v, V[:n], _dots(V[:n], w))  # w is M v
        # Once more, as rounding brings old directions back; what that does to sizes follows from them.
        low = metric.lower(v)
        back = _dots(V[:n], low)
        v, P = _less(v, V[:n], back), penalty[:n, :n]
        size = ((v * low).sum().double() - back.square().sum() + back @ P @ back).clamp(min=0).sqrt()
        scale = size if scale is None else scale
        if not size > 1e-7 * scale:
            break
        V[n] = v.div_(size)
        del v, low
        penalty[n, :n] = penalty[:n, n] = (back - P @ back) / size
        penalty[n, n] = 1.0
        w = product(V[n]).to(b.dtype)
        gram[n, : n + 1] = gram[: n + 1, n] = _dots(V[: n + 1], w)
        n += 1
    V = V[:n]
    return Directions(vectors=V, gram=gram[:n, :n], cross=_dots(V, b), penalty=penalty[:n, :n])


def _dots(V: Tensor, w: Tensor) -> Tensor:
    """Inner products (n,) in float64."""
    return (V.flatten(1) @ w.flatten()).double()


def _less(v: Tensor, V: Tensor, steps: Tensor) -> Tensor:
    return v.sub_((steps.to(V.dtype) @ V.flatten(1)).view_as(v)) if len(V) else v
