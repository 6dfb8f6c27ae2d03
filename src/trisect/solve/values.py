"""Value bases that all heads of a layer agree on, with every cross-head correlation counted.

h = query heads, k = value heads, g = h / k, d = head width, r = rank, D = d_model
"""

import torch
from torch import Tensor

from trisect.solve.basis import Basis, shared_basis

CONJUGATE_STEPS = 20


def value_bases(gram: Tensor, W: Tensor, *, kv_heads: int, rank: int, rounds: int) -> Tensor:
    """Bases T (k, d, r) for  min E|a W - sum_i a_i T_g(i) B_i|^2  over T and B together.      [math.md V-1]

    `gram` (h d, h d) is the moment of all head outputs, `W` (h, d, D) what they are multiplied with. Starts
    from the pooled per-head solution and alternates between B (least squares) and T (conjugate gradients: the
    system in T has (k d r)^2 entries and is never formed).
    """
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
    return shared_basis(_sum_groups(blocks, kv_heads), _sum_groups(W @ W.mT, kv_heads))


def stacked(T: Tensor, heads: int) -> Tensor:
    """(k, d, r) -> the block-diagonal (h d, h r) that maps all head outputs at once."""
    return torch.block_diag(*T.repeat_interleave(heads // len(T), dim=0))


def _outputs(T: Tensor, gram: Tensor, goal: Tensor) -> Tensor:
    """B (h, r, D): least squares for fixed bases."""
    h, r = goal.shape[0], T.shape[-1]
    wide = stacked(T, h)
    system = wide.mT @ gram @ wide
    system.diagonal().add_(1e-9 * system.diagonal().mean())
    return torch.linalg.solve(system, wide.mT @ goal.flatten(0, 1)).unflatten(0, (h, r))


def _improve(T: Tensor, B: Tensor, gram: Tensor, goal: Tensor) -> Tensor:
    """T for fixed B, by conjugate gradients on the normal equations."""
    k, group = len(T), len(B) // len(T)

    def normal(X: Tensor) -> Tensor:
        outputs = X.repeat_interleave(group, dim=0) @ B  # (h, d, D)
        seen = (gram @ outputs.flatten(0, 1)).unflatten(0, outputs.shape[:2])
        return _sum_groups(seen @ B.mT, k)

    residual = _sum_groups(goal @ B.mT, k) - normal(T)
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


def _sum_groups(per_head: Tensor, groups: int) -> Tensor:
    return per_head.unflatten(0, (groups, -1)).sum(dim=1)
