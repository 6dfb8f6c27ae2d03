"""What softmax sees of each rotation pair: attention-weighted covariances of sampled queries.   [math.md S-1]

For a query m and keys n, pair f adds s_f(m, n) to the score. Softmax ignores what is the same for all keys,
so an error counts by its variance under the attention weights p(n | m).

b = batch, t = tokens, h = query heads, k = key heads, g = h / k, P = rotation pairs, q = sampled queries
"""

import torch
from torch import Tensor

# Sampled queries per layer over all windows; more settle the Gram, fewer save time.
QUERIES = 2048


class ScoreSampler:
    """Sums Gram matrices of [s | t] (t the quadrature of s) over random queries of every window."""

    def __init__(self, num_pairs: int, *, per_window: int, seed: int):
        self.num_pairs = num_pairs
        self.per_window = per_window
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, q: Tensor, k: Tensor, mask: Tensor | None = None) -> tuple[Tensor, int]:
        """Scaled and rotated queries (b, t, h, d) and keys (b, t, k, d) -> (h, 2P, 2P) and the count."""
        b, t, h, _ = q.shape
        count = min(self.per_window, t)
        total = torch.zeros(h, 2 * self.num_pairs, 2 * self.num_pairs, dtype=torch.float64, device=q.device)
        for window in range(b):
            # The first tokens have nothing to choose between.
            positions = torch.randint(t // 8, t, (count,), generator=self.generator).to(q.device)
            rows = None if mask is None else mask[min(window, len(mask) - 1)][:, positions]
            total += self._window(q[window, positions], k[window], positions, rows)
        return total, b * count

    def _window(self, q: Tensor, k: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
        """(q, h, d), (t, k, d) -> (h, 2P, 2P), one key head at a time to bound memory."""
        heads = k.shape[1]
        q = q.unflatten(1, (heads, -1)).permute(1, 2, 0, 3).float()  # (k, g, q, d)
        k = k.transpose(0, 1).float()  # (k, t, d)
        hidden = torch.arange(k.shape[1], device=k.device) > positions.unsqueeze(-1)  # (q, t)
        grams = []
        for query, key in zip(q, k, strict=True):
            scores = (query @ key.mT).masked_fill(hidden, float("-inf"))  # (g, q, t)
            if rows is not None:
                rows_t = rows[..., : k.shape[1]]
                masked = ~rows_t if rows_t.dtype == torch.bool else rows_t < -1e4
                scores = scores.masked_fill(masked, float("-inf"))
            grams.append(self._gram(query, key, scores.softmax(dim=-1)))
        return torch.cat(grams)

    def _gram(self, query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        """(g, q, d), (t, d), (g, q, t) -> (g, 2P, 2P): covariance of [s | t] under the weights.

        Both are linear in the key, so the key's covariance (2P x 2P per query) is all that is summed over
        tokens: s = q1 k1 + q2 k2 and t = q1 k2 - q2 k1.
        """
        P = self.num_pairs
        key = key[:, : 2 * P]
        key = key - key.mean(dim=0)  # a shift that no covariance sees, and that saves its digits
        mean = weights @ key  # (g, q, 2P)
        cov = (weights.unsqueeze(-1) * key).mT @ key - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        turned = self._turned(query, cov)  # rows: k -> [s | t]
        return self._turned(query, turned.mT).sum(dim=1).double()

    def _turned(self, query: Tensor, x: Tensor) -> Tensor:
        """Map the second last dimension from key channels to [s | t]: (g, q, 2P, n) -> (g, q, 2P, n)."""
        P = self.num_pairs
        q1, q2 = query[..., :P, None], query[..., P : 2 * P, None]
        k1, k2 = x[..., :P, :], x[..., P:, :]
        return torch.cat([q1 * k1 + q2 * k2, q1 * k2 - q2 * k1], dim=-2)
