"""A KV cache of latents: factored keys and values are remembered narrow and expanded behind the cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trisect.models.factored import FactoredLinear

# b = batch, t = tokens, k = key/value heads


@dataclass(frozen=True, kw_only=True)
class Latents:
    """Which of a layer's keys and values ("k", "v") the cache holds as latents."""

    maps: Mapping[str, FactoredLinear]
    kv_heads: int
    clips: Mapping[str, float | None]
    """Bounds that keys and values are clamped to, once they are expanded."""

    def __contains__(self, name: str) -> bool:
        return name in self.maps

    def __bool__(self) -> bool:
        return bool(self.maps)

    def heads(self, name: str, columns: Tensor) -> Tensor:
        """(b, t, columns) as heads (b, t, k, width); latents are expanded and clamped."""
        if name in self.maps:
            columns = clamped(self.maps[name].expand(columns), self.clips[name])
        return columns.unflatten(-1, (self.kv_heads, -1))

    def recalled(self, cache: Any, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Put keys and values (b, t, ...) into the cache, and make heads of all that it holds.

        Both lie there as one head, (b, 1, t, columns): a static cache has as many for values as for keys.
        """
        k, v = cache.update(k.flatten(2).unsqueeze(1), v.flatten(2).unsqueeze(1), layer)
        return self.heads("k", k.squeeze(1)), self.heads("v", v.squeeze(1))


def clamped(x: Tensor, bound: float | None) -> Tensor:
    return x if bound is None else x.clamp(-bound, bound)
