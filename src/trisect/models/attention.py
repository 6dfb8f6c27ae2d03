"""The one attention forward: every family, any head widths.

A stock attention module cannot hold a compressed layer: it views q, k and v with one head width, rotates all
heads alike and derives its scale from that width. `own` turns a stock module into one that can, in place and
with the same parameters, so that names, hooks and `isinstance` checks elsewhere go on working.

b = batch, t = tokens, h = query heads, k = key/value heads, g = h / k
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trisect.kernels import rotate_qk, wants_decode_kernel
from trisect.kernels.sdpa import padded, sdpa
from trisect.models.families import Family
from trisect.models.linear import QKV, FactoredLinear, FusedMaps, HeadLayout, SplitLinear, fused_maps
from trisect.models.rotary import to_canonical


def interface(name: str, *, device: torch.device) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function transformers has under a name, or ours where that one is slow or wrong."""
    found: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    if found is sdpa_attention_forward and device.type in ("cpu", "cuda"):
        return _fused
    if "flash" in name:
        return partial(_equalled, found)
    return found


def _fused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Our way through torch's fused attention, for `attn_implementation="sdpa"`."""
    causal = module.is_causal if is_causal is None else is_causal
    out = sdpa(query, key, value, attention_mask, scale=scaling, dropout=dropout, causal=bool(causal))
    return out, None


def _equalled(
    attend: Callable[..., tuple[Tensor, Tensor | None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Flash attention takes one width: transformers pads values up to keys, but cuts wider ones off."""
    width = max(query.shape[-1], value.shape[-1])
    return attend(module, *(padded(x, width) for x in (query, key, value)), *args, **kwargs)


def eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention spelt out, for `attn_implementation="eager"`: the reference for every other kernel."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = query @ key.mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[-2]]
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


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


def steps_alone(attention: Any, cache: Any, q: Tensor) -> bool:
    """Whether queries (b, t, h, qk) of a layer go this way."""
    if not attention.prepared or attention.live is None:
        return False
    ours = getattr(cache, "clock", None) is attention.live.clock
    single = q.shape[1] == 1 and not attention.live.clock.prompt
    plain = attention.tap is None and attention.config._attn_implementation == "sdpa"
    return ours and single and plain and wants_decode_kernel(q)


def stepped(
    attention: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: tuple[Tensor, Tensor] | None,
    positions: Tensor | None,
) -> Tensor:
    """One new token per text (b, 1, heads, width): into the cache, and its attention (b, 1, h, vo)."""
    a, live, clock = attention, attention.live, attention.live.clock
    if a.num_pairs:
        cos, sin = (None, None) if table is None or a.rotary_rates is not None else table
        angles = cos, sin, a.rotary_index, a.rotary_rates, positions
        adjacent = a.family.rotary == "adjacent"
        torch.ops.trisect.rotate_write_(
            q, k, v, live.keys, live.values, clock.slot, *angles, a.num_pairs, adjacent
        )
    else:
        live.update(k.transpose(1, 2), v.transpose(1, 2))
    if a.family.position_scale:
        q = q * a.position_scale(positions, q.dtype)
    scale = float(getattr(a, a.family.scale))
    out: Tensor = torch.ops.trisect.attend_one(
        q.transpose(1, 2), live.keys, live.values, clock.start, clock.slot, scale, a.window
    )
    return out


Tap = Callable[..., None]
"""Called with a name and one or more tensors (b, t, heads, width) while calibration listens."""


class Attention(nn.Module):
    """Attention with its own query/key and value widths, frequencies and norms."""

    config: Any
    family: Family
    layer_idx: int
    heads: int
    kv_heads: int
    num_key_value_groups: int
    qk_width: int
    vo_width: int
    num_pairs: int
    shared_output: bool
    clips_qk: float | None
    clips_v: float | None
    rotary_index: Tensor | None
    rotary_rates: Tensor | None
    tap: Tap | None
    is_causal: bool
    fused: FusedMaps | None
    prepared: bool
    live: Any
    """The layer of a LiveCache that belongs to this one, where a decoder has told us: an index would have a
    compiler make every layer anew."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        position_bias: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if self.tap is not None:
            self.tap("x", hidden_states)
        cache = past_key_values if past_key_values is not None else layer_past
        late = self._latents(cache)
        q, k, v = self._project(hidden_states, late)
        if self.tap is not None:
            self._listen(q, late.heads("k", k.flatten(2)), late.heads("v", v.flatten(2)))
        if position_bias is None and not late and steps_alone(self, cache, q):
            out = stepped(self, q, k, v, position_embeddings, position_ids)
            return self._put_out(out), None
        if self.num_pairs:
            assert position_embeddings is not None
            q, k = self._rotate(q, k, position_embeddings, positions=position_ids)
        if self.family.position_scale:
            q = q * self.position_scale(position_ids, q.dtype)
        scale = getattr(self, self.family.scale)
        if self.tap is not None and self.num_pairs:
            self._listen_rotated(q * scale, k, attention_mask)
        if late:
            k, v = late.recalled(cache, k, v, self.layer_idx)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (b, heads, t, width)
        if cache is not None and not late:
            k, v = self._remembered(cache, k, v)
        if position_bias is not None:
            attention_mask = _biased_mask(position_bias, attention_mask, key_length=k.shape[-2])
        attend = interface(self.config._attn_implementation, device=q.device)
        out, weights = attend(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=self._dropout() if self.training else 0.0,
            # Scores approximate those of the original head, so they keep the original head's scale.
            scaling=scale,
            sliding_window=self.window,
            position_ids=position_ids,
            **kwargs,
        )
        return self._put_out(out[..., : self.vo_width]), weights

    def _put_out(self, out: Tensor) -> Tensor:
        """Head outputs (b, t, h, vo) through the output projection."""
        if self.tap is not None:
            self.tap("a", out)
        out = out.sum(dim=2) if self.shared_output else out.flatten(2)
        out = getattr(self, self.family.o)(out.contiguous())
        if self.family.output_dropout is not None:
            out = getattr(self, self.family.output_dropout)(out)
        return out

    def _project(self, x: Tensor, late: Latents) -> tuple[Tensor, Tensor, Tensor]:
        """Query (b, t, h, qk), key (b, t, k, qk) and value (b, t, k, vo), clamped and normalised.

        Late keys and values are still latents, (b, t, groups * rank).
        """
        q, k, v = self._late_heads(x, late) if late else self.layout.split(self._columns(x))
        q = clamped(q, self.clips_qk)
        k = k if "k" in late else clamped(k, self.clips_qk)
        v = v if "v" in late else clamped(v, self.clips_v)
        if self.family.norms is not None:
            if self.tap is not None:
                self.tap("q_raw", self._canonical(q))
                self.tap("k_raw", self._canonical(k))
            q_norm, k_norm = self.family.norms
            q, k = getattr(self, q_norm)(q), getattr(self, k_norm)(k)
        return q, k, v

    def _columns(self, x: Tensor) -> list[Tensor]:
        """What the projections put out, or all of it at once."""
        modules = [getattr(self, name) for name in self.family.qkv]
        if self.fused is not None and self.fused.applies(modules):
            return [self.fused(x)]
        return [module(x) for module in modules]

    def prepare(self) -> None:
        """Make ready for inference: q, k and v in one product where they are plain maps, rotated in place.

        Weights keep their names and values; whoever hooks a projection may see its output rotated.
        """
        modules = [getattr(self, name) for name in self.family.qkv]
        if len(modules) > 1 and (self.fused is None or not self.fused.holds(modules)):
            self.fused = fused_maps(modules)
        self.prepared = True

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Another device or dtype gives every weight memory of its own.
        self.fused = None
        return super()._apply(fn, recurse)

    def _remembered(self, cache: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.live is not None and self.live.clock is getattr(cache, "clock", None):
            kept: tuple[Tensor, Tensor] = self.live.update(k, v)
        else:
            kept = cache.update(k, v, self.layer_idx)
        return kept

    def _late_heads(self, x: Tensor, late: Latents) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (
            late.maps[name].latent(x) if name in late else late.heads(name, self._map(name)(x))
            for name in ("k", "v")
        )
        return self._map("q")(x).unflatten(-1, (self.heads, -1)), k, v

    def _map(self, name: str) -> nn.Module:
        """The module of queries, keys or values, where each has its own."""
        names = self.family.qkv
        module: nn.Module = getattr(self, names[QKV.index(name) if len(names) > 1 else 0])
        return module.get_submodule(name) if isinstance(module, SplitLinear) else module

    def _latents(self, cache: Any) -> Latents:
        """What the cache is to hold narrow: not keys where a norm or a rotation stands in between."""
        plain_keys = not self.num_pairs and self.family.norms is None
        names = () if cache is None else ("k", "v") if plain_keys else ("v",)
        maps = {name: self._map(name) for name in names}
        return Latents(
            maps={name: m for name, m in maps.items() if isinstance(m, FactoredLinear) and m.cached},
            kv_heads=self.kv_heads,
            clips={"k": self.clips_qk, "v": self.clips_v},
        )

    @property
    def window(self) -> int | None:
        return getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))

    @property
    def layout(self) -> HeadLayout:
        return HeadLayout(
            heads=self.heads,
            kv_heads=self.kv_heads,
            qk=self.qk_width,
            vo=self.vo_width,
            per_head=self.family.per_head,
        )

    def _rotate(
        self, q: Tensor, k: Tensor, table: tuple[Tensor, Tensor], *, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert self.family.rotary is not None
        return rotate_qk(
            q,
            k,
            pairs=self.num_pairs,
            layout=self.family.rotary,
            table=table,
            index=self.rotary_index,
            rates=self.rotary_rates,
            positions=positions,
            in_place=self.prepared and self.tap is None,
        )

    def position_scale(self, position_ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        rope = self.config.rope_parameters
        beta, original = (
            rope.get("llama_4_scaling_beta"),
            rope.get("original_max_position_embeddings"),
        )
        assert position_ids is not None
        scale = 1 + beta * torch.log(1 + torch.floor(position_ids / original))
        return scale[..., None, None].to(dtype)  # (b, t, 1, 1)

    def _dropout(self) -> float:
        dropout = getattr(self, self.family.dropout)
        return dropout.p if isinstance(dropout, nn.Dropout) else dropout

    def _listen(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        assert self.tap is not None
        self.tap("q", self._canonical(q))
        self.tap("k", self._canonical(k))
        self.tap("v", v)

    def _listen_rotated(self, q: Tensor, k: Tensor, mask: Tensor | None) -> None:
        assert self.tap is not None
        heard = [self._canonical(q), self._canonical(k)]
        self.tap("rotated", *heard, *([] if mask is None else [mask]))

    def _canonical(self, x: Tensor) -> Tensor:
        return to_canonical(x, self.num_pairs, self.family.rotary)


def own(module: nn.Module, family: Family, config: Any) -> Attention:
    """Turn a stock attention module into an Attention, in place. Owned ones are returned as they are."""
    if isinstance(module, Attention):
        return module
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    rotates = family.rotary is not None and (family.rotates is None or bool(getattr(module, family.rotates)))
    clip = None if family.clip is None else getattr(module, family.clip)
    stock: Any = type(module)
    module.__class__ = _owned_class(stock)
    assert isinstance(module, Attention)
    module.register_buffer("rotary_index", None)
    module.register_buffer("rotary_rates", None)
    module.config, module.family = config, family
    module.heads = heads
    module.kv_heads = getattr(config, "num_key_value_heads", None) or heads
    module.num_key_value_groups = heads // module.kv_heads
    module.qk_width = module.vo_width = width
    module.num_pairs = _rotary_width(config, width) // 2 if rotates else 0
    module.shared_output = False
    module.clips_qk = module.clips_v = clip or None
    module.is_causal, module.tap = True, None
    module.fused, module.prepared, module.live = None, False, None
    return module


@cache
def _owned_class(stock: Any) -> type[Attention]:
    """Attention first, so that its forward wins; the stock class second, so that `isinstance` still holds."""
    return type(f"Owned{stock.__name__}", (Attention, stock), {"__module__": __name__})


def _rotary_width(config: Any, head_width: int) -> int:
    rope = getattr(config, "rope_parameters", None) or {}
    return int(head_width * rope.get("partial_rotary_factor", 1.0))


def _biased_mask(position_bias: Tensor, mask: Tensor | None, *, key_length: int) -> Tensor:
    """ALiBi's bias (h, 1, longest) for the keys at hand, and minus infinity where `mask` is set."""
    bias = position_bias[..., -key_length:].unsqueeze(0)  # (1, h, 1, keys)
    if mask is None:
        return bias
    return torch.where(mask[..., :key_length], torch.finfo(bias.dtype).min, bias)
