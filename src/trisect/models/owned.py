"""Stock attention modules turned into owned ones, and the kinds whose keys and values are not made head by head.

In place and with the same parameters, so that names, hooks and `isinstance` checks elsewhere go on working.

b = batch, t = tokens, h = query heads
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from trisect.kernels import rotate_qk
from trisect.kernels.rotary import Layout
from trisect.models.attention import Attention, Maps, layout_of, named, window_of
from trisect.models.families import Family, Latent
from trisect.models.linear import QKV


class LatentAttention(Attention):
    """Keys and values out of one latent per token, which is what the cache holds (MLA)."""

    plain = False

    def _project(self, x: Tensor, latent: Maps) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries (b, t, h, qk + rotated), the rotated key (b, t, 1, rotated) and the latent (b, t, 1, rank)."""
        names = self.family.latent
        assert names is not None
        (down, norm, up), query = names.q, latent_query(self, names)
        latent_q = getattr(self, norm)(getattr(self, down)(x)) if query == up else x
        q = getattr(self, query)(latent_q).unflatten(-1, (self.layout.heads, -1))
        both = getattr(self, names.compress)(x)
        compressed, k = both.split([both.shape[-1] - self.layout.rotated, self.layout.rotated], dim=-1)
        compressed = getattr(self, names.norm)(compressed)
        if self.tap is not None:
            for name, heads in zip(QKV, (q[..., : self.layout.qk], *self._expanded(compressed)), strict=True):
                self.tap(name, heads)
        return q, k.unsqueeze(2), compressed.unsqueeze(2), None

    def _turned(
        self, q: Tensor, k: Tensor, table: Any, positions: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The rotated channels of queries, and the key of such channels that all heads share."""
        plain, turned = q.split([self.layout.qk, self.layout.rotated], dim=-1)
        adjacent = getattr(self.config, "rope_interleave", self.family.rotary == "adjacent")
        layout: Layout = "adjacent" if adjacent else "half"
        turned, k = rotate_qk(turned, k, pairs=self.layout.rotated // 2, layout=layout, table=table)
        return torch.cat([plain, turned], dim=-1), k

    def _remembered(self, q: Tensor, k: Tensor, v: Tensor, cache: Any, latent: Maps) -> tuple[Tensor, Tensor, Tensor]:
        """The cache holds the latent and the shared key; heads are made of all that it has."""
        compressed, turned = self._cached(cache, v.transpose(1, 2), k.transpose(1, 2))
        k, v = (x.transpose(1, 2) for x in self._expanded(compressed.squeeze(1)))
        k = torch.cat([k, turned.expand(-1, self.layout.heads, -1, -1)], dim=-1)
        return q.transpose(1, 2), k, v

    def _expanded(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (b, t, h, qk), without their rotated channels, and values (b, t, h, vo)."""
        assert self.family.latent is not None
        both = getattr(self, self.family.latent.kv)(latent).unflatten(-1, (self.layout.heads, -1))
        k, v = both.split([self.layout.qk, self.layout.vo], dim=-1)
        return k, v


class LendingAttention(Attention):
    """Later layers may look at this one's keys and values (Gemma 4)."""

    layer_type: str
    store_full_length_kv: bool

    def _remembered(self, q: Tensor, k: Tensor, v: Tensor, cache: Any, latent: Maps) -> tuple[Tensor, Tensor, Tensor]:
        """As others do, and noted for those layers."""
        cache, lent = cache
        q, k, v = super()._remembered(q, k, v, cache, latent)
        if self.store_full_length_kv:
            lent[self.layer_type] = k, v
        return q, k, v


class BorrowingAttention(LendingAttention):
    """Queries alone, which look at keys and values of an earlier layer."""

    plain = False

    def _project(self, x: Tensor, latent: Maps) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries (b, t, h, qk), and no keys or values."""
        assert self.family.norms is not None
        q = self._map("q")(x).unflatten(-1, (self.layout.heads, -1))
        q = self._normed(getattr(self, self.family.norms[0]), q)
        return q, q[:, :, :1], q, None

    def _remembered(self, q: Tensor, k: Tensor, v: Tensor, cache: Any, latent: Maps) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (x.to(q.device) for x in cache[1][self.layer_type])
        return q.transpose(1, 2), k, v


def latent_query(module: Any, latent: Latent) -> str:
    """The projection that makes the heads' queries: from their latent, or from the hidden states."""
    return latent.q[2] if getattr(module, latent.q[2], None) is not None else latent.plain_q


def own(module: nn.Module, family: Family, config: Any) -> Attention:
    """Turn a stock attention module into an Attention, in place. Owned ones are returned as they are."""
    if isinstance(module, Attention):
        return module
    layout = layout_of(module, family, config)
    kind = Attention if family.latent is None else LatentAttention
    if family.lends_keys:
        kind = LendingAttention if layout.kv_heads else BorrowingAttention
    mix_in(kind, module, "Owned")
    assert isinstance(module, Attention)
    module.register_buffer("rotary_index", None)
    module.register_buffer("rotary_rates", None)
    module.config, module.family, module.layout = config, family, layout
    if layout.kv_heads:
        module.num_key_value_groups = layout.heads // layout.kv_heads
    module.clips_qk = module.clips_v = named(module, family.clip) or None
    module.is_causal = True
    module.window = window_of(module, config)
    return module


def mix_in(mixin: Any, module: Any, prefix: str) -> None:
    """Make a module one of `mixin`, whose forward wins; `isinstance` checks for its stock class still hold."""
    if not isinstance(module, mixin):
        stock: Any = type(module)
        module.__class__ = _mixed_class(prefix, mixin, stock)


@cache
def _mixed_class(prefix: str, mixin: Any, stock: Any) -> Any:
    """One class for all layers, or a compiler would take them for different ones."""
    return type(f"{prefix}{stock.__name__}", (mixin, stock), {"__module__": __name__})
