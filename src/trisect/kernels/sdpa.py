"""torch's fused attention for any head widths, without its slow math backend and without needless copies.

b = batch, t = new tokens, s = tokens to look at, h = query heads, k = key/value heads, g = h / k
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from trisect.kernels.routes import AS_THEY_ARE, Heads, Route, kind_of, route


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    dropout: float = 0.0,
    causal: bool = True,
) -> Tensor:
    """Attention of q (b, h, t, qk) over k (b, k, s, qk) and v (b, k, s, vo): (b, t, h, vo).

    Without a mask, `causal` lets a token look at those before it; a single token looks at everything.
    """
    length, vo = q.shape[2], v.shape[3]
    causal = length > 1 and mask is None and causal
    if causal and k.shape[2] > length:  # an empty static cache behind the prompt
        k, v = k[:, :, :length], v[:, :, :length]
    way = route_of(q, k, v, mask)
    if way.plain:
        return one_query(q, k, v, mask, scale=scale, dropout=dropout)
    q, k, v = prepared(q, k, v, way)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[..., :vo].transpose(1, 2)


def route_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Route:
    """The route for these tensors; training takes no detour around copies that the cache would pay for."""
    if q.dtype == torch.float64 and q.device.type != "cpu":
        return AS_THEY_ARE  # no fused kernel has float64
    heads = Heads(
        qk=q.shape[3],
        vo=v.shape[3],
        group=q.shape[1] // k.shape[1],
        masked=mask is not None,
        single=q.shape[2] == 1,
        bytes_per_element=q.element_size(),
    )
    return route(kind_of(q.device), heads)


def prepared(q: Tensor, k: Tensor, v: Tensor, way: Route) -> tuple[Tensor, Tensor, Tensor]:
    """Heads as the route wants them."""
    if way.pad is not None:
        q, k, v = (padded(x, way.pad) for x in (q, k, v))
    if way.repeat:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return q, k, v


def padded(x: Tensor, width: int) -> Tensor:
    """Zero channels behind: they change neither scores nor outputs."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def one_query(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, dropout: float = 0.0
) -> Tensor:
    """Attention of a single token as two matrix products: keys and values are read where they lie."""
    kv_heads = k.shape[1]
    queries = q.squeeze(2).unflatten(1, (kv_heads, -1)) * scale  # (b, k, g, qk)
    scores = queries @ k.mT  # (b, k, g, s)
    if mask is not None:
        if mask.shape[1] > 1:  # per query head
            mask = mask.squeeze(2).unflatten(1, (kv_heads, -1))
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    wide = torch.float32 if scores.element_size() < 4 else scores.dtype
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(q.dtype)
    weights = F.dropout(weights, p=dropout) if dropout else weights
    return (weights @ v).flatten(1, 2).unsqueeze(1)  # (b, k, g, vo) -> (b, 1, h, vo)
