"""The best map of low rank when errors in some input directions count more: every weighted SVD is this one.

    min  |L (W - A B)|^2   over A (in, r) and B (r, out)                                     [math.md L-1]

L is the identity, a diagonal, or any root of the inputs' second moment, L^T L = E[x^T x]; in the last case
the minimum is E|x W - x A B|^2 itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SOLVE_DTYPE = torch.float64  # roots of ill-conditioned moments lose half their digits, which float32 cannot spare
FLOOR = 1e-13  # directions whose energy is below this share of the mean are silence plus rounding, not signal
BALANCE_FLOOR = 1e-12  # balancing divides by roots of singular values; below this share of the largest is nothing
CONJUGATE_STEPS = 8
LARGE = 256  # matrices with both sides at least this long are solved through their square


@dataclass(frozen=True, kw_only=True)
class Factor:
    """C = root^T root on the directions kept, with inverse the right inverse of root there."""

    root: Tensor  # (..., d, d)
    inverse: Tensor  # (..., d, d); x = (x inverse) root for every x the moment has seen
    clipped: float  # share of directions that fell below the floor and were set to zero


def factor(C: Tensor, *, floor: float = FLOOR) -> Factor:
    """Factor a (batch of) second moment(s) by eigendecomposition."""
    # A Cholesky factor would be as good where it exists; this one also exists for moments of fewer tokens
    # than channels, and says how many directions it had to drop.
    C = C.to(SOLVE_DTYPE)
    values, vectors = torch.linalg.eigh((C + C.mT) / 2)
    mean = values.clamp(min=0).mean(dim=-1, keepdim=True)
    alive = values > floor * mean
    safe = torch.where(alive, values, torch.ones_like(values)).sqrt()
    root = torch.where(alive, safe, 0.0).unsqueeze(-1) * vectors.mT
    inverse = vectors * torch.where(alive, 1 / safe, 0.0).unsqueeze(-2)
    clipped = 1.0 - alive.double().mean().item() if alive.numel() else 0.0
    return Factor(root=root, inverse=inverse, clipped=clipped)


@dataclass(frozen=True, kw_only=True)
class Basis:
    """All ranks of one bilinear problem at once: any width is a slice of it."""

    values: Tensor  # (..., d) eigenvalues of S, largest first: the energy of each slot
    x_slots: Tensor  # (..., d, d) x -> slots of unit energy
    y_slots: Tensor  # (..., d, d) y -> slots that carry the energy
    clipped: float

    def maps(self, rank: int) -> tuple[Tensor, Tensor]:
        """x_map and y_map of shape (..., d, rank), the energy shared evenly between the two sides."""
        values = self.values[..., :rank]
        largest = self.values[..., :1].clamp(min=torch.finfo(SOLVE_DTYPE).tiny)
        scale = (values / largest).clamp(min=BALANCE_FLOOR).mul(largest).pow(0.25).unsqueeze(-2)
        return self.x_slots[..., :rank] * scale, self.y_slots[..., :rank] / scale

    def loss(self, rank: int) -> Tensor:
        """What a width of `rank` loses, exactly: the eigenvalues left out.             [math.md B-3]"""
        return self.values[..., rank:].sum(dim=-1)

    @property
    def total(self) -> Tensor:
        return self.values.sum(dim=-1)


def shared_basis(C_x: Tensor, C_y: Tensor) -> Basis:
    """Solve  min E |x (I - P) y^T|^2  over rank-r maps P, for every r at once.     [math.md B-1, B-2]"""
    # C_x = F^T F, S = F C_y F^T = V diag(values) V^T; the slots are x F^+ V and y F^T V. Leading
    # dimensions are a batch of problems (heads).
    F = factor(C_x)
    S = F.root @ C_y.to(SOLVE_DTYPE) @ F.root.mT
    values, V = torch.linalg.eigh((S + S.mT) / 2)
    values, V = values.flip(-1).clamp(min=0), V.flip(-1)
    return Basis(values=values, x_slots=F.inverse @ V, y_slots=F.root.mT @ V, clipped=F.clipped)


def value_bases(gram: Tensor, W: Tensor, *, kv_heads: int, rank: int, rounds: int) -> Tensor:
    """Bases T (k, d, r) for  min E|a W - sum_i a_i T_g(i) B_i|^2  over T and B together.      [math.md V-1]"""
    # `gram` (h d, h d) is the moment of all head outputs, `W` (h, d, D) what they are multiplied with. Starts from the
    # pooled per-head solution and alternates between B (least squares) and T (conjugate gradients: the system in T has
    # (k d r)^2 entries and is never formed).
    h, d, _ = W.shape
    T, _ = pooled_basis(gram, W, kv_heads=kv_heads).maps(rank)
    T = torch.linalg.qr(T).Q
    goal = (gram @ W.flatten(0, 1)).unflatten(0, (h, d))  # C W, (h, d, D)
    for _ in range(rounds):
        T = torch.linalg.qr(_improve(T, _outputs(T, gram, goal), gram, goal)).Q
    return T


def pooled_basis(gram: Tensor, W: Tensor, *, kv_heads: int) -> Basis:
    """Each value head by itself, from the blocks of `gram` that its query heads have on the diagonal."""
    h, d, _ = W.shape
    blocks = gram.unflatten(0, (h, d)).unflatten(-1, (h, d)).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    return shared_basis(sum_groups(blocks, h // kv_heads), sum_groups(W @ W.mT, h // kv_heads))


def stacked(T: Tensor, heads: int) -> Tensor:
    """(k, d, r) -> the block-diagonal (h d, h r) that maps all head outputs at once."""
    return torch.block_diag(*T.repeat_interleave(heads // len(T), dim=0))


def _outputs(T: Tensor, gram: Tensor, goal: Tensor) -> Tensor:
    """B (h, r, D): least squares for fixed bases."""
    h, d, _ = goal.shape
    heads = T.repeat_interleave(h // len(T), dim=0)  # (h, d, r)
    rows = (heads.mT @ gram.unflatten(0, (h, d))).flatten(0, 1)  # (h r, h d)
    system = (rows.unflatten(-1, (h, d)).transpose(0, 1) @ heads).transpose(0, 1).flatten(1)  # (h r, h r)
    system.diagonal().add_(1e-9 * system.diagonal().mean())
    return torch.linalg.solve(system, (heads.mT @ goal).flatten(0, 1)).unflatten(0, (h, -1))


def _improve(T: Tensor, B: Tensor, gram: Tensor, goal: Tensor) -> Tensor:
    """T for fixed B, by conjugate gradients on the normal equations."""
    (k, d, r), h = T.shape, len(B)
    flat = B.flatten(0, 1)
    # Products of outputs, once: a step then costs one basis per head and no d_model.
    outputs = (flat @ flat.mT).unflatten(0, (h, r))  # (h, r, h r)
    gram = gram.unflatten(0, (h, d))  # (h, d, h d)

    def normal(X: Tensor) -> Tensor:
        seen = X.repeat_interleave(h // k, dim=0) @ outputs  # (h, d, h r)
        return sum_groups(gram @ seen.flatten(0, 1).unflatten(-1, (h, r)).transpose(0, 1), h // k)

    residual = sum_groups(goal @ B.mT, h // k) - normal(T)
    direction, size = residual, residual.square().sum()
    enough = 1e-20 * size
    for _ in range(CONJUGATE_STEPS):
        # Once there, further steps are none: looking whether to stop would make a GPU wait every time.
        going = size > enough
        image = normal(direction)
        step = torch.where(going, size / (direction * image).sum(), 0.0)
        T, residual = T + step * direction, residual - step * image
        size, before = residual.square().sum(), size
        direction = residual + torch.where(going, size / before, 0.0) * direction
    return T


def sum_groups(per_head: Tensor, group: int) -> Tensor:
    """(h, ...) -> (k, ...): over the query heads that share a key or value head."""
    return per_head.unflatten(0, (-1, group)).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """One linear map as two, each pair of column and row with the norm shared evenly between them."""

    A: Tensor  # (in, r)
    B: Tensor  # (r, out)
    loss: float  # |L (W - A B)|^2, exactly: the squared singular values left out
    total: float


def low_rank(W: Tensor, rank: int, L: Tensor | None = None) -> LowRank:
    """Rank-r factors of W (in, out); L is (in, in), (in,) for a diagonal, None for the identity.   [math.md L-2]"""
    # With L W = U S V^T the papers write A B = L^-1 U_r S_r V_r^T. The same product is W V_r V_r^T, which needs
    # no inverse of L and so exists for every L.
    W = W.to(SOLVE_DTYPE)
    seen = W
    if L is not None:
        seen = L.to(SOLVE_DTYPE).unsqueeze(-1) * W if L.ndim == 1 else L @ W
    values, Vh, audible = _right_singular(seen)
    rank = min(rank, len(values))
    found_rank = min(rank, audible)
    B = Vh[:found_rank]
    A = W @ B.mT
    if found_rank < rank:
        # The weighted problem is solved with ranks to spare: they go to what no weighted input can tell.
        rest = W - A @ B
        more = _right_singular(rest)[1][: rank - found_rank]
        A, B = torch.cat([A, rest @ more.mT], dim=1), torch.cat([B, more])
    # Rows of B have unit length; afterwards |a_j| = |b_j|, and neither leaves the range of 16 bits.
    size = A.norm(dim=0)
    scale = torch.where(size > 0, size, 1.0).sqrt()
    A, B, energy = A / scale, scale.unsqueeze(-1) * B, values.square()
    return LowRank(A=A, B=B, loss=energy[rank:].sum().item(), total=energy.sum().item())


def _right_singular(M: Tensor) -> tuple[Tensor, Tensor, int]:
    """Singular values, right singular vectors as rows, largest first, and how many stand above rounding."""
    # Large matrices go through the eigenvectors of their smaller square, in half the time of an SVD or less;
    # what the square loses are directions some seven digits below the loudest.
    eps = torch.finfo(M.dtype).eps * max(M.shape)
    if min(M.shape) < LARGE:
        _, values, Vh = torch.linalg.svd(M, full_matrices=False)
        return values, Vh, int((values > eps * values[:1]).sum())
    wide = M.shape[0] < M.shape[1]
    squares, vectors = torch.linalg.eigh(M @ M.mT if wide else M.mT @ M)
    values = squares.flip(-1).clamp(min=0).sqrt()
    found_rank = int((values > eps**0.5 * values[:1]).sum())
    V = vectors.flip(-1)
    if wide:
        V = torch.linalg.qr(M.mT @ V[:, :found_rank] / values[:found_rank]).Q
    return values, V.mT, found_rank
