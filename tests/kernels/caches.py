"""Random caches with a query, and their attention written out in float64."""

import torch
from torch import Tensor

SCALE = 0.3


def cached(
    batch: int, kv_heads: int, group: int, qk: int, vo: int, length: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(qk + 7 * vo)
    q = torch.randn(batch, kv_heads * group, 1, qk, generator=g)
    keys = torch.randn(batch, kv_heads, length, qk, generator=g)
    values = torch.randn(batch, kv_heads, length, vo, generator=g)
    return q.to(dtype), keys.to(dtype), values.to(dtype)


def written_out(q: Tensor, keys: Tensor, values: Tensor, start: Tensor | None, stop: int, window: int | None) -> Tensor:
    """(b, 1, h, vo), text by text and head by head."""
    group = q.shape[1] // keys.shape[1]
    texts = []
    for text in range(q.shape[0]):
        first = 0 if start is None else int(start[text])
        first = first if window is None else max(first, stop + 1 - window)
        heads = []
        for head in range(q.shape[1]):
            k, v = (x[text, head // group, first : stop + 1].double() for x in (keys, values))
            heads.append(torch.softmax(k @ q[text, head, 0].double() * SCALE, dim=0) @ v)
        texts.append(torch.stack(heads))
    return torch.stack(texts).unsqueeze(1)
