"""torch's fused attention for any head widths, without its slow math backend and without needless copies.

b = batch, t = new tokens, s = tokens to look at, h = query heads, k = key/value heads, g = h / k
"""

import os
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Kind = Literal["cpu", "cudnn", "cuda"]
"""A CPU; a GPU where torch tries cuDNN attention first (Hopper, Blackwell); any other GPU."""

CUDNN_WIDEST = 128


class Heads(NamedTuple):
    """What a call brings along."""

    qk: int
    vo: int
    group: int  # queries per key head
    masked: bool
    single: bool  # one new token per text: everything else comes out of the cache, and a copy would be of all of it
    bytes_per_element: int = 2


@dataclass(frozen=True, kw_only=True)
class Route:
    """What is done to heads before a kernel gets them."""

    pad: int | None = None  # zero channels up to this width, for queries, keys and values alike
    repeat: bool = False  # keys and values once per query head: the kernel knows no groups
    plain: bool = False  # two matrix products instead of a kernel: for one query, they copy nothing

    @property
    def copies(self) -> bool:
        """Whether keys and values are written again for every call."""
        return self.pad is not None or self.repeat


AS_THEY_ARE = Route()


def route(kind: Kind, heads: Heads) -> Route:
    """The way through torch's attention that avoids the math backend at the least cost."""
    found = _fitting(kind, heads)
    return Route(plain=True) if heads.single and found.copies else found


def _fitting(kind: Kind, heads: Heads) -> Route:
    if kind == "cpu":
        return AS_THEY_ARE if heads.qk == heads.vo else Route(pad=max(heads.qk, heads.vo))
    if heads.bytes_per_element != 2:
        return _memory_efficient(heads, step=4)
    step = channel_step(kind, heads.bytes_per_element)
    pad = None if heads.qk % step == 0 == heads.vo % step else rounded(max(heads.qk, heads.vo), step)
    if kind == "cudnn" and (pad or max(heads.qk, heads.vo)) <= CUDNN_WIDEST:
        return Route(pad=pad)
    if heads.masked:
        return _memory_efficient(heads, step=step)
    equal = heads.qk == heads.vo and pad is None
    return AS_THEY_ARE if equal else Route(pad=rounded(max(heads.qk, heads.vo), step))


def _memory_efficient(heads: Heads, *, step: int) -> Route:
    """Takes unequal widths and masks, but neither groups nor widths off the grid."""
    off_grid = heads.qk % step or heads.vo % step
    pad = rounded(max(heads.qk, heads.vo), step) if off_grid else None
    return Route(pad=pad, repeat=heads.group > 1)


def channel_step(kind: Kind, bytes_per_element: int) -> int:
    """Head widths have to be multiples of this, or channels are added at every call."""
    return 1 if kind == "cpu" else 16 // bytes_per_element


def rounded(width: int, step: int) -> int:
    """Up to the next multiple."""
    return -(-width // step) * step


def kind_of(device: torch.device) -> Kind:
    """Which rules hold on a device; a CPU's for anything unknown."""
    if device.type != "cuda":
        return "cpu"
    return "cudnn" if _prefers_cudnn(device.index) else "cuda"


def _prefers_cudnn(index: int | None) -> bool:
    """torch's own rule (check_prefer_cudnn_attention), and its switches."""
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1" or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    major, minor = torch.cuda.get_device_capability(index)
    version = torch.backends.cudnn.version() or 0
    return major in (9, 10) and minor in (0, 3) and version > 91500


# What torch.compiler.assume_constant_result would say, were its import not that of the whole compiler.
_prefers_cudnn._dynamo_marked_constant = True  # type: ignore[attr-defined]


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    dropout: float = 0.0,
    causal: bool = True,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q (b, h, t, qk) over k (b, k, s, qk) and v (b, k, s, vo): (b, t, h, vo)."""
    # Without a mask, `causal` lets a token look at those before it; a single token looks at everything. `sinks`
    # (h,) are logits that join the softmax and add nothing.
    length, vo = q.shape[2], v.shape[3]
    causal = length > 1 and mask is None and causal
    if causal and k.shape[2] > length:  # an empty static cache behind the prompt
        k, v = k[:, :, :length], v[:, :, :length]
    way = route_of(q, k, v, mask)
    if way.plain or (sinks is not None and length == 1):
        return one_query(q, k, v, mask, scale=scale, dropout=dropout, sinks=sinks)
    if sinks is not None:
        q, k, v, mask = with_sink(q, k, v, mask, sinks / scale, causal=causal)
        causal, way = False, route_of(q, k, v, mask)
    if way.copies:
        q, k, v = prepared(q, k, v, way)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return (out if way.pad is None else out[..., :vo]).transpose(1, 2)


def with_sink(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, logits: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """One more key, of value zero, that every query sees: a channel of its own gives each head its logit (h,)."""
    own = logits.to(q.dtype).reshape(1, -1, 1, 1).expand(*q.shape[:3], 1)
    sink = F.pad(k.new_ones(1, 1, 1, 1), (k.shape[3], 0)).expand(*k.shape[:2], 1, -1)
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
    if mask is not None:
        mask = F.pad(mask[..., : k.shape[2]], (0, 1), value=1.0 if mask.dtype == torch.bool else 0.0)
    return torch.cat([q, own], dim=-1), torch.cat([F.pad(k, (0, 1)), sink], dim=2), F.pad(v, (0, 0, 0, 1)), mask


def route_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Route:
    """The route for these tensors; training takes no detour around copies that the cache would pay for."""
    on_cpu = q.device.type == "cpu"
    if q.shape[3] == v.shape[3] if on_cpu else q.dtype == torch.float64:
        return AS_THEY_ARE  # what `_on_cpu` says, sooner; and no fused kernel has float64
    masked, single = mask is not None, q.shape[2] == 1
    heads = Heads(q.shape[3], v.shape[3], q.shape[1] // k.shape[1], masked, single, q.element_size())
    return route(kind_of(q.device), heads)


def prepared(q: Tensor, k: Tensor, v: Tensor, way: Route) -> tuple[Tensor, Tensor, Tensor]:
    """Heads as the route wants them."""
    if way.pad is not None:
        q, k, v = (_aligned(padded(x, way.pad)) for x in (q, k, v))
    if way.repeat:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return q, k, v


def padded(x: Tensor, width: int) -> Tensor:
    """Zero channels behind: they change neither scores nor outputs."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _aligned(x: Tensor) -> Tensor:
    """With rows that begin at multiples of 16 bytes, as kernels read them: parts of a fused product need not."""
    step = channel_step("cpu" if x.device.type == "cpu" else "cuda", x.element_size())
    return x.contiguous() if any(stride % step for stride in x.stride()[:3]) else x


def one_query(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
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
    if sinks is not None:
        own = sinks.to(scores.dtype).reshape(1, kv_heads, -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, own], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(q.dtype)[..., : k.shape[2]]
    weights = F.dropout(weights, p=dropout) if dropout else weights
    return (weights @ v).flatten(1, 2).unsqueeze(1)  # (b, k, g, vo) -> (b, 1, h, vo)
