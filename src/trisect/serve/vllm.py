"""Native folders in vLLM: its transformers backend around our own narrow model, for all families at once.

vLLM builds the model without its head through AutoModel, which gives our classes: layers are narrow and attention
is trisect's (models/attention.py). What is done here is what that backend cannot know: heads are split over
processes, the KV cache is as wide as a layer's own heads, experts have a width per layer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention as PagedAttention
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.models.transformers import TransformersForCausalLM, TransformersMoEForCausalLM
from vllm.model_executor.models.transformers.utils import replace_linear_class
from vllm.model_executor.models.utils import PPMissingLayer, WeightsMapper
from vllm.v1.attention.selector import get_attn_backend

from trisect.errors import TrisectError
from trisect.models import LayerView, family_for, layer_views, owned
from trisect.models.attention import Attention
from trisect.models.heads import HeadNorm
from trisect.models.linear import FactoredLinear, SplitLinear
from trisect.serve import check_served

CPU_WIDTHS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head widths that vLLM's attention on CPUs computes right, tried one by one (tests/serving)."""
STEP = 8  # other backends say themselves what they run; they are asked for multiples of this
WIDEST = 512
EXPERT_STEP = 32  # vLLM's experts on CPUs have widths in multiples of this
VALUES_APART = ("FLASH_ATTN_DIFFKV", "TRITON_ATTN_DIFFKV")
"""Backends whose values have a width of their own, one for all layers; vLLM takes them where a user asks for one.

All others split their cache, or read it, by the width of keys (tests/serving/test_backends.py).
"""
MERGED = "qkv_merged"


class Apart(nn.Module):
    """Mixed into modules with factored maps: vLLM asks one module of a class which products it may fuse."""


Mixin: Any = object  # its class is vLLM's in the end, and type checkers ask nothing of it


class Narrow(Mixin):
    """Mixed in before a class of vLLM's transformers backend."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if hasattr(self, "logits_processor"):
            self.logits_processor.scale /= getattr(self.text_config, "logits_scaling", 1.0)

    def _patch_config(self) -> None:
        """Built with attention that every class of transformers knows; `recursive_replace` switches it."""
        check_served(family_for(self.config).name)
        if getattr(self.text_config, "num_kv_shared_layers", 0):
            raise TrisectError("The vLLM plugin does not serve models whose layers lend each other keys and values.")
        super()._patch_config()
        self.text_config._attn_implementation = "eager"

    def _create_hf_to_vllm_mapper(self) -> None:
        """Our files have no stray tensors, and patterns for those of others may match some of ours (GPT-2)."""
        self.model._keys_to_ignore_on_load_unexpected = None
        super()._create_hf_to_vllm_mapper()

    def views(self) -> list[LayerView]:
        """The layers that this process has."""
        return [view for view in layer_views(self.model) if not isinstance(view.layer, PPMissingLayer)]

    def recursive_replace(self) -> None:
        """Heads first, which only we know how to split; vLLM replaces the rest as it always does."""
        if self.config.trisect.get("quantization"):
            raise TrisectError("vLLM cannot run trisect's own quantised weights; serve the 16-bit folder.")
        self.text_config._attn_implementation = "vllm"
        stacked: dict[str, tuple[str, str]] = {}
        names = {id(module): f"model.{name}" for name, module in self.model.named_modules()}
        for view in self.views():
            module: Any = view.attention_module
            stacked |= self.split_heads(module, names[id(module)])
        for module in self.model.modules():
            if any(isinstance(child, FactoredLinear | SplitLinear) for child in module.children()):
                owned.mix_in(Apart, module, "Factored")
        if any(view.experts is not None for view in self.views()):
            with self._own_experts():
                super().recursive_replace()
        else:  # one of a family with experts may have none
            self.num_moe_layers = 0
            TransformersForCausalLM.recursive_replace(self)
        self.hf_to_vllm_mapper |= WeightsMapper(
            orig_to_new_stacked=stacked, orig_to_new_prefix={"embed_out.": "lm_head."}
        )

    def split_heads(self, module: Attention, prefix: str) -> dict[str, tuple[str, str]]:
        """Give a module this process's heads, with one product for queries, keys and values.

        Returned is which weight of the files is which part of that product.
        """
        layout, family, size = module.layout, module.family, self.tp_group.world_size
        maps = [getattr(module, name) for name in family.qkv] if family.latent is None else []
        out = getattr(module, family.o)
        plain = all(type(linear) is nn.Linear for linear in (*maps, out)) and not module.shared_output
        shardable = plain and maps and not layout.per_head and not family.output_gate
        together = any(isinstance(norm, HeadNorm) and norm.dims != (-1,) for norm in module.children())
        if size > 1 and (not shardable or together or layout.heads % size):
            raise TrisectError(f"{prefix} cannot be split over {size} processes: --tensor-parallel-size 1.")
        if not shardable:
            return {}
        module.layout = replace(layout, heads=layout.heads // size, kv_heads=max(1, layout.kv_heads // size))
        module.num_key_value_groups = module.layout.heads // module.layout.kv_heads
        biased = any(linear.bias is not None for linear in maps)
        merged = QKVParallelLinear(
            maps[0].in_features,
            layout.qk,
            layout.heads,
            layout.kv_heads,
            bias=biased,
            quant_config=self.quant_config,
            prefix=f"{prefix}.{MERGED}",
            return_bias=False,
            v_head_size=layout.vo,
        )
        if biased:
            merged.bias.data.zero_()
        name = MERGED if len(maps) == 3 else family.qkv[0]
        for old in family.qkv:
            delattr(module, old)
        setattr(module, name, merged)
        module.family = replace(family, qkv=(name,))
        setattr(
            module, family.o, replace_linear_class(out, "rowwise", self.quant_config, prefix=f"{prefix}.{family.o}")
        )
        self._split_rows(module, layout.kv_heads)
        parts = zip(family.qkv, "qkv", strict=True) if name == MERGED else ()
        return {f"{prefix}.{old}.": (f"{prefix}.{MERGED}.", part) for old, part in parts}

    def _split_rows(self, module: Attention, kv_heads: int) -> None:
        """What has a row for every head: frequencies of key heads, and weights of norms."""
        size, rank = self.tp_group.world_size, self.tp_group.rank_in_group
        heads, keys = module.layout.heads, module.layout.kv_heads
        first_key = rank * keys if kv_heads >= size else rank * kv_heads // size
        for name in ("rotary_index", "rotary_rates"):
            buffer = getattr(module, name)
            if buffer is not None:
                buffer = torch.empty(keys, buffer.shape[1], dtype=buffer.dtype)
                buffer.weight_loader = _rows(first_key, keys)  # type: ignore[attr-defined]
                setattr(module, name, buffer)
        for name, first, rows in zip(module.family.norms or (), (rank * heads, first_key), (heads, keys), strict=False):
            norm = getattr(module, name, None)
            if isinstance(norm, HeadNorm):
                norm.weight = nn.Parameter(torch.empty(rows, norm.weight.shape[1]), requires_grad=False)
                norm.weight.weight_loader = _rows(first, rows)  # type: ignore[attr-defined]
        if module.family.sinks is not None:  # now, because vLLM's attention keeps the tensor that it is given
            sinks = nn.Parameter(torch.empty(heads), requires_grad=False)
            sinks.weight_loader = _rows(rank * heads, heads)  # type: ignore[attr-defined]
            setattr(module, module.family.sinks, sinks)

    @contextmanager
    def _own_experts(self) -> Iterator[None]:
        """A width per layer, where vLLM looks for one; layers that lost experts keep transformers' own module."""
        experts = {view.index: view.experts for view in self.views() if view.experts is not None}
        kept = [(e.block, e.module) for e in experts.values() if e.dropped or not self._fuses(e.width)]
        layers = range(self.text_config.num_hidden_layers)
        widths = [experts[i].width if i in experts else 0 for i in layers]
        for block, _ in kept:
            del block.experts
        settings: Any = vars(self.text_config)  # its class would not take a list
        had = settings.get("moe_intermediate_size")
        settings["moe_intermediate_size"] = widths
        try:
            yield
        finally:
            settings["moe_intermediate_size"] = had
            for block, module in kept:
                block.experts = module

    def _fuses(self, width: int) -> bool:
        """Whether vLLM's product of all experts takes this width."""
        step = EXPERT_STEP if self.device_config.device.type == "cpu" else 1
        return width % step == 0 and self.text_config.hidden_size % step == 0

    def _create_attention_instances(self, prefix: str = "") -> None:
        """One paged cache per layer, as wide as its heads."""
        names = {id(module): name for name, module in self.model.named_modules()}
        values = max((view.attention_module.layout.vo for view in self.views()), default=0)
        for view in self.views():
            module: Any = view.attention_module
            window = self._window(module, view.index)
            more = {} if module.sink_logits is None else {"sinks": module.sink_logits}
            width, apart = self._cache_widths(module, window, values)
            module.attn = PagedAttention(
                module.layout.heads,
                width,
                float(module.score_scale),
                num_kv_heads=module.layout.kv_heads,
                cache_config=self.cache_config,
                quant_config=self.quant_config,
                logits_soft_cap=module.softcap,
                per_layer_sliding_window=window,
                prefix=f"{prefix}.model.{names[id(module)]}.attn".removeprefix("."),
                **more,
                **apart,
            )

    def _cache_widths(self, module: Attention, window: int | None, values: int) -> tuple[int, dict[str, Any]]:
        """The width of a layer's keys, and what vLLM is told of values whose width is another one.

        `values` is the width of the widest in the model: a backend for such values has one width for all layers.
        """
        asked = get_current_vllm_config().attention_config.backend
        keys = module.layout.qk + module.layout.rotated
        if asked is None or asked.name not in VALUES_APART:
            return cache_width(max(keys, module.layout.vo), window=window, cache=self.cache_config), {}
        backend: Any = asked.get_class()
        width, values = next(w for w in widths_from(keys) if backend.supports_head_size(w)), next(widths_from(values))
        backend.set_head_size_v(values)
        return width, {"attn_backend": backend, "head_size_v": values}

    def _window(self, module: Attention, index: int) -> int | None:
        kinds = getattr(self.text_config, "layer_types", None)
        if kinds:
            return self.text_config.sliding_window if kinds[index] == "sliding_attention" else None
        return module.window


def _rows(first: int, count: int) -> Callable[[Tensor, Tensor], None]:
    """A weight loader that takes some rows of what is in the file."""

    def load(parameter: Tensor, loaded: Tensor) -> None:
        parameter.data.copy_(loaded[first : first + count])

    return load


def widths_from(needed: int) -> Iterator[int]:
    """Widths that some attention may run, from the narrowest on that holds `needed`."""
    return iter(range(-(-needed // STEP) * STEP, WIDEST + 1, STEP))


def cache_width(needed: int, *, window: int | None, cache: Any) -> int:
    """The narrowest head width that the attention of this machine runs, at least `needed`."""
    for width in widths_from(needed):
        try:
            backend = get_attn_backend(
                width, torch.get_default_dtype(), cache.cache_dtype, has_sliding_window=window is not None
            )
        except ValueError:  # no backend runs it
            continue
        if width in CPU_WIDTHS if backend.get_name() == "CPU_ATTN" else backend.supports_head_size(width):
            return width
    raise TrisectError(f"No attention of this vLLM runs heads of width {needed}.")


class NarrowForCausalLM(Narrow, TransformersForCausalLM):
    """A compressed model."""


class NarrowMoEForCausalLM(Narrow, TransformersMoEForCausalLM):
    """One with experts."""
