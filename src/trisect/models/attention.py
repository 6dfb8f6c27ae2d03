"""The one attention forward: every family, any head widths.

A stock attention module cannot hold a compressed layer: it views q, k and v with one head width, rotates all
heads alike and derives its scale from that width. `own` (owned.py) turns a stock module into one that can.

b = batch, t = tokens, h = query heads, k = key/value heads, g = h / k
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trisect.kernels import rotate_qk, wants_decode_kernel
from trisect.models.families import Family
from trisect.models.heads import TANGENTS, HeadNorm, biased_mask, eager, function_name, rope_of, to_canonical
from trisect.models.linear import QKV, FactoredLinear, FusedMaps, SplitLinear, fused_maps

Tap = Callable[..., None]  # called with a name and one or more tensors (b, t, heads, width) while calibration records
Lift = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""What stands in for queries, keys and values as the maps put them out, while calibration differentiates by them."""
Maps = Mapping[str, FactoredLinear]
Table = tuple[Tensor, Tensor]  # cosines and sines of the model's rotations


def clamped(x: Tensor, bound: float | None) -> Tensor:
    return x if bound is None else x.clamp(-bound, bound)


def named(owner: Any, name: str | None) -> Any:
    """What a module has under a name of the family's record; None where the record names nothing."""
    return None if name is None else getattr(owner, name)


@dataclass(frozen=True, kw_only=True)
class HeadLayout:
    """Sizes of a layer's heads and how its projections hold them."""

    heads: int
    kv_heads: int
    qk: int
    vo: int
    per_head: bool = False  # one projection with [queries | k | v] key head by key head
    pairs: int = 0  # rotation pairs of a query/key head
    rotated: int = 0  # channels of a query head beside those, all rotated, with one key for all heads (MLA)

    def split(self, columns: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """(..., out) of one or three projections -> (..., h, qk), (..., k, qk), (..., k, vo)."""
        if self.per_head:
            group = self.heads // self.kv_heads
            each = columns[0].unflatten(-1, (self.kv_heads, -1))
            q, k, v = each.split([group * self.qk, self.qk, self.vo], dim=-1)
            return q.unflatten(-1, (group, self.qk)).flatten(-3, -2), k, v
        if len(columns) == 1:
            sizes = [self.heads * self.qk, self.kv_heads * self.qk, self.kv_heads * self.vo]
            columns = columns[0].split_with_sizes(sizes, dim=-1)
        q, k, v = columns
        rows = q.shape[:-1]
        # Not unflatten and split, which are Python: a step of a small model on a CPU takes as long as its calls.
        return (
            q.view(*rows, self.heads, self.qk),
            k.view(*rows, self.kv_heads, self.qk),
            v.view(*rows, self.kv_heads, self.vo),
        )


class Attention(nn.Module):
    """Attention with its own query/key and value widths, frequencies and norms."""

    config: Any
    family: Family
    layer_idx: int
    layout: HeadLayout
    num_key_value_groups: int
    clips_qk: float | None
    clips_v: float | None
    rotary_index: Tensor | None
    rotary_rates: Tensor | None
    is_causal: bool
    window: int | None  # tokens that a query sees; asking a config takes longer than a small layer's product
    shared_output = False
    plain = True  # keys and values are made head by head, each by a map of the hidden states
    tap: Tap | None = None
    lift: Lift | None = None
    fused: FusedMaps | None = None
    prepared = False
    live: Any = None  # its part of a decoder's LiveCache; an index into that would be compiled for every layer

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        position_bias: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cache = past_key_values if past_key_values is not None else layer_past
        lent = kwargs.pop("shared_kv_states", None)
        if position_embeddings is not None:
            position_embeddings = self._whole_table(position_embeddings)
        if self.family.position_scale == "unrotated":  # stock layers do not tell them; padding counts as text
            seen = 0 if cache is None else cache.get_seq_length(self.layer_idx)
            position_ids = (torch.arange(hidden_states.shape[1], device=hidden_states.device) + seen).unsqueeze(0)
        latent = self._latent_maps(cache)
        q, k, v, gate = self._project(hidden_states, latent)
        if position_bias is None and not latent and self._decodes(cache, q):
            return self._put_out(self._decode(q, k, v, position_embeddings, position_ids), gate), None
        q, k = self._turned(q, k, position_embeddings, position_ids, attention_mask)
        q, k, v = self._remembered(q, k, v, cache if lent is None else (cache, lent), latent)
        if position_bias is not None:
            attention_mask = biased_mask(position_bias, attention_mask, key_length=k.shape[-2])
        # vLLM reads these lines: it looks for the registry's name, and for `scaling` as an attribute of self.
        asked = self.config._attn_implementation if self.lift is None else TANGENTS
        name = function_name(asked, device=q.device, capped=self.softcap is not None)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
        settings = {**self._settings(), "position_ids": position_ids, **kwargs}
        out, weights = attend(self, q, k, v, attention_mask, scaling=self.score_scale, **settings)
        return self._put_out(out, gate), weights

    def _turned(
        self, q: Tensor, k: Tensor, table: Table | None, positions: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys (b, t, heads, qk) as they are compared: rotated, normalised, scaled by position."""
        if self.layout.pairs:
            angles: Any = {"table": table, "index": self.rotary_index, "rates": self.rotary_rates}
            kind: Any = {"layout": self.family.rotary, "in_place": self.prepared and self.tap is None}
            q, k = rotate_qk(q, k, pairs=self.layout.pairs, positions=positions, **angles, **kind)
        if self.norm_last:
            q, k = self._normalise(q, k)
            if self.tap is not None:
                self.tap("q", self._canonical(q))
                self.tap("k", self._canonical(k))
        q = self._tempered(q, positions)
        if self.tap is not None and self.layout.pairs:
            scaled = self._canonical(q * self.score_scale)
            self.tap("rotated", scaled, self._canonical(k), mask, self.sink_logits)
        return q, k

    def _remembered(self, q: Tensor, k: Tensor, v: Tensor, cache: Any, latent: Maps) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and all keys and values that the cache then has, (b, heads, t, width)."""
        if latent:  # as one head, (b, 1, t, columns): a static cache has as many for values as for keys
            k, v = cache.update(k.flatten(2).unsqueeze(1), v.flatten(2).unsqueeze(1), self.layer_idx)
            k, v = self._as_heads("k", k.squeeze(1), latent), self._as_heads("v", v.squeeze(1), latent)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return (q, k, v) if latent else (q, *self._cached(cache, k, v))

    def _cached(self, cache: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All that a cache holds of (b, heads, t, width) once these are in it."""
        if cache is None:
            return k, v
        live = self.live is not None and self.live.clock is getattr(cache, "clock", None)
        found: tuple[Tensor, Tensor] = self.live.update(k, v) if live else cache.update(k, v, self.layer_idx)
        return found

    def _settings(self) -> dict[str, Any]:
        """What the attention function is told about this module, beside its scale."""
        dropout = named(self, self.family.dropout) or 0.0
        settings = {"dropout": getattr(dropout, "p", dropout) if self.training else 0.0, "sliding_window": self.window}
        more = {"s_aux": self.sink_logits, "softcap": self.softcap}
        return settings | {name: value for name, value in more.items() if value is not None}

    def _put_out(self, out: Tensor, gate: Tensor | None = None) -> Tensor:
        """Head outputs (b, t, h, vo) through their gate and the output projection."""
        out = out if gate is None else out * torch.sigmoid(gate)
        if self.tap is not None:
            self.tap("a", out)
        out = out.sum(dim=2) if self.shared_output else out.flatten(2)
        out = getattr(self, self.family.o)(out.contiguous())
        if self.family.output_dropout is not None:
            share = getattr(self, self.family.output_dropout)
            out = nn.functional.dropout(out, p=getattr(share, "p", share), training=self.training)
        return out

    def _project(self, x: Tensor, latent: Maps) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query (b, t, h, qk), key (b, t, k, qk) and value (b, t, k, vo), clamped and normalised; a gate like q."""
        # Keys and values that are cached as latents still are those, (b, t, groups * rank).
        gate = None
        if self.tap is not None:
            self.tap("x", x)
        if latent:
            k, v = (
                latent[name].narrow(x) if name in latent else self._as_heads(name, self._map(name)(x), latent)
                for name in ("k", "v")
            )
            q = self._map("q")(x).unflatten(-1, (self.layout.heads, -1))
        elif self.family.output_gate:
            both, keys, values = self._columns(x)
            q, gate = both.unflatten(-1, (self.layout.heads, -1)).split([self.layout.qk, self.layout.vo], dim=-1)
            k, v = (columns.unflatten(-1, (self.layout.kv_heads, -1)) for columns in (keys, values))
        else:
            q, k, v = self.layout.split(self._columns(x))
        if self.lift is not None:
            q, k, v = self.lift(q, k, v)
        q = clamped(q, self.clips_qk)
        k = k if "k" in latent else clamped(k, self.clips_qk)
        v = v if "v" in latent else clamped(v, self.clips_v)
        norm = named(self, self.family.value_norm)
        v = v if norm is None else norm(v)
        if not self.norm_last:
            q, k = self._normalise(q, k)
        if self.tap is not None:
            if not self.norm_last:
                self.tap("q", self._canonical(q))
                self.tap("k", self._canonical(self._as_heads("k", k.flatten(2), latent)))
            self.tap("v", self._as_heads("v", v.flatten(2), latent))
        return q, k, v, gate

    def _normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (b, t, heads, qk) behind their norms, where they have any."""
        norms = norms_of(self, self.family) if self.family.norms else ()
        if not norms:
            return q, k
        if self.tap is not None:
            for name, raw in (("q_raw", self._canonical(q)), ("k_raw", self._canonical(k))):
                # A norm over all heads sees one head of all channels.
                self.tap(name, raw.flatten(2).unsqueeze(2) if self.family.norm_over == "heads" else raw)
        normed = [self._normed(norm, heads) for norm, heads in zip(norms, (q, k), strict=True)]
        return normed[0], normed[1]

    def _normed(self, norm: nn.Module, heads: Tensor) -> Tensor:
        """(b, t, heads, width) as the norm's module wants them, and back."""
        over: str = "head" if isinstance(norm, HeadNorm) else self.family.norm_over
        if over == "heads":
            return norm(heads.flatten(2)).view_as(heads)
        return norm(heads) if over == "head" else norm(heads.transpose(1, 2)).transpose(1, 2)

    def _columns(self, x: Tensor) -> list[Tensor]:
        """What the projections put out, or all of it at once."""
        modules = [getattr(self, name) for name in self.family.qkv]
        if self.fused is not None and self.fused.applies(modules):
            return [self.fused(x)]
        found: list[Any] = [None if module is None else module(x) for module in modules]
        return [found[1] if columns is None else columns for columns in found]  # keys that are values, too

    def _latent_maps(self, cache: Any) -> Maps:
        """The maps whose narrow side the cache holds: not keys behind a norm or a rotation."""
        if cache is None or self.family.output_gate or not self.plain:
            return {}
        maps = {name: self._map(name) for name in ("k", "v")}
        found = {name: m for name, m in maps.items() if isinstance(m, FactoredLinear) and m.cached}
        if "k" in found and (self.layout.pairs or norms_of(self, self.family)):
            del found["k"]
        return found

    def _as_heads(self, name: str, columns: Tensor, latent: Maps) -> Tensor:
        """(b, t, columns) of keys or values as heads (b, t, k, width); latents are expanded and clamped."""
        if name in latent:
            columns = clamped(latent[name].wide(columns), self.clips_qk if name == "k" else self.clips_v)
        return columns.unflatten(-1, (self.layout.kv_heads, -1))

    def _decodes(self, cache: Any, q: Tensor) -> bool:
        """Whether queries (b, t, h, qk) are single tokens of a decoder, for which there is a kernel."""
        if not self.prepared or self.live is None:
            return False
        ours = getattr(cache, "clock", None) is self.live.clock
        single = q.shape[1] == 1 and not self.live.clock.prompt
        return ours and single and self.tap is None and wants_decode_kernel(q) and self.has_kernel

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, table: Table | None, positions: Tensor | None) -> Tensor:
        """One new token per text (b, 1, heads, width): into the cache, and its attention (b, 1, h, vo)."""
        live, clock = self.live, self.live.clock
        if self.layout.pairs:
            cos, sin = (None, None) if table is None or self.rotary_rates is not None else table
            angles = cos, sin, self.rotary_index, self.rotary_rates, positions
            how = self.layout.pairs, self.family.rotary == "adjacent"
            torch.ops.trisect.rotate_write_(q, k, v, live.keys, live.values, clock.slot, *angles, *how)
        else:
            live.update(k.transpose(1, 2), v.transpose(1, 2))
        q = self._tempered(q, positions).transpose(1, 2)
        seen = live.keys, live.values, clock.start, clock.slot
        out: Tensor = torch.ops.trisect.attend_one(q, *seen, float(self.score_scale), self.window)
        return out

    def prepare(self) -> None:
        """Make ready for inference: q, k and v in one product where they are plain maps, rotated in place."""
        # Weights keep their names and values; whoever hooks a projection may see its output rotated.
        self.prepared = True
        if len(self.family.qkv) == 1 or self.family.output_gate or not self.plain:
            return
        modules = [getattr(self, name) for name in self.family.qkv]
        if self.fused is None or not self.fused.holds(modules):
            self.fused = fused_maps(modules)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Another device or dtype gives every weight memory of its own.
        self.fused = None
        return super()._apply(fn, recurse)

    def _map(self, name: str) -> nn.Module:
        """The module of queries, keys or values, where each has its own."""
        names = self.family.qkv
        module: nn.Module = getattr(self, names[QKV.index(name) if len(names) > 1 else 0])
        return module.get_submodule(name) if isinstance(module, SplitLinear) else module

    def _whole_table(self, table: Any) -> Table:
        """Cosines and sines with the columns [all frequencies | all again]; some have complex numbers."""
        short = self.family.short_table
        if isinstance(table, Tensor):
            table, short = (table.real, table.imag), True
        if self.family.paired_table:
            table = [torch.cat([x[..., ::2], x[..., 1::2]], dim=-1) for x in table]
        cos, sin = (torch.cat([x, x], dim=-1) if short else x for x in table)
        return cos, sin

    @property
    def score_scale(self) -> float:
        """What scores are multiplied with: they approximate those of the original head, so its scale stays."""
        scale: float = getattr(self, self.family.scale)
        return scale if self.family.key_scale is None else scale * getattr(self, self.family.key_scale)

    @property
    def norm_last(self) -> bool:
        """Whether queries and keys are normalised behind the rotation."""
        return self.family.norm_last and bool(norms_of(self, self.family))

    @property
    def softcap(self) -> float | None:
        """The bound that scores have."""
        return named(self, self.family.softcap)

    @property
    def has_kernel(self) -> bool:
        """Whether single tokens may go through the decode kernel, which knows nothing of all this."""
        plain = self.sink_logits is None and self.family.latent is None and self.softcap is None and not self.norm_last
        return plain and self.config._attn_implementation == "sdpa"

    @property
    def sink_logits(self) -> Tensor | None:
        """(h,) what each head's softmax has beside its keys."""
        return named(self, self.family.sinks)

    def _tempered(self, q: Tensor, positions: Any) -> Tensor:
        """Queries (b, t, h, qk) times the temperature of their positions, where the layer has one."""
        stock: Any = self
        if self.family.position_scale == "rotated":
            rope = self.config.rope_parameters
            steps = torch.floor(positions / rope.get("original_max_position_embeddings"))
            scale = 1 + rope.get("llama_4_scaling_beta") * torch.log(1 + steps)
        elif self.family.position_scale == "unrotated" and stock.attn_temperature_tuning and not stock.use_rope:
            scale = torch.log1p(torch.floor((positions + 1.0) / stock.floor_scale)) * stock.attn_scale + 1.0
        else:
            return q
        return q * scale[..., None, None].to(q.dtype)  # (b, t, 1, 1)

    def _canonical(self, x: Tensor) -> Tensor:
        return to_canonical(x, self.layout.pairs, self.family.rotary)


def layout_of(module: Any, family: Family, config: Any) -> HeadLayout:
    """Sizes of an attention module's heads: an owned one knows them, a stock one's are in the text config."""
    if isinstance(module, Attention):
        return module.layout
    heads = config.num_attention_heads
    if family.latent is not None:
        widths = {"qk": config.qk_nope_head_dim, "vo": config.v_head_dim, "rotated": config.qk_rope_head_dim}
        return HeadLayout(heads=heads, kv_heads=heads, **widths)
    if family.lends_keys:
        width, kv_heads = module.head_dim, 0 if module.is_kv_shared_layer else heads // module.num_key_value_groups
    else:
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
    rope = rope_of(config, getattr(module, "layer_idx", 0))
    # A proportional table has every channel, and angles of zero for those that stay.
    turns = 1.0 if rope.get("rope_type") == "proportional" else rope.get("partial_rotary_factor", 1.0)
    return HeadLayout(
        heads=heads,
        kv_heads=kv_heads if family.kv_heads is None else getattr(module, family.kv_heads),
        qk=width,
        vo=width,
        per_head=family.per_head,
        pairs=int(width * turns) // 2 if _rotates(module, family, config) else 0,
    )


def _rotates(module: Any, family: Family, config: Any) -> bool:
    """Whether a layer's heads rotate."""
    if family.rotates_by is not None and getattr(config, family.rotates_by) != "rope":
        return False
    if family.rotates_windows and getattr(config, "sliding_window", None) is not None:
        return bool(config.layer_types[module.layer_idx] == "sliding_attention")
    return family.rotary is not None and (family.rotates is None or bool(getattr(module, family.rotates)))


def window_of(module: Any, config: Any) -> int | None:
    """How far back a layer's queries see, where that is bounded."""
    kinds = getattr(config, "layer_types", None)
    if not getattr(module, "is_sliding", True) or (kinds and kinds[module.layer_idx] == "full_attention"):
        return None
    found: int | None = getattr(module if hasattr(module, "sliding_window") else config, "sliding_window", None)
    return found or None  # Qwen 2 with experts says 0 for none


def norms_of(module: Any, family: Family) -> tuple[nn.Module, ...]:
    """The norms of queries and keys; none in a model that goes without."""
    one = getattr(module, family.one_norm or "", None)
    found: list[Any] = [getattr(module, name, one) for name in family.norms or ()]
    return tuple(norm for norm in found if norm is not None)
