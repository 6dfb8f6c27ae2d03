"""Fewer bits: weights of dense or compressed models, and their KV caches; and the bits that these really take."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, Conv1D, DynamicCache, DynamicLayer

from trisect.config.verbs import QuantizeConfig
from trisect.errors import TrisectError
from trisect.models import LayerView, compressed, layer_views, linear, original_shape, shape_of
from trisect.plan import budget_of
from trisect.records.parts import LINEARS

AUTO_SIZES = (128, 64, 32, 16, 8)  # group sizes that `auto` tries for a layer, in this order


def require(backend: str) -> None:
    """Refuse before the work, if the library is not installed."""
    try:
        import_module("hqq.core.quantize" if backend == "hqq" else "torchao.quantization")
    except ImportError as error:
        raise TrisectError(f"{backend} is not installed ({error}); type: pip install 'trisect[quantize]'") from error


def hqq_levels(weight: Tensor, *, bits: int, group_size: int) -> tuple[linear.Levels, linear.Packing]:
    """HQQ with its own defaults, groups along the inputs; weight is (out, in)."""
    from hqq.core.quantize import BaseQuantizeConfig, Quantizer

    settings = BaseQuantizeConfig(nbits=bits, group_size=group_size, axis=1)["weight_quant_params"]
    values, meta = Quantizer.quantize(weight.float(), **settings, bitpack=False, device=str(weight.device))
    out, groups = len(weight), weight.shape[1] // group_size
    scale, zero = (meta[name].view(out, groups) for name in ("scale", "zero"))
    # HQQ keeps scales and zeros in 16 bits; far from zero, a group of almost equal weights can exceed them.
    fits = all(bool(x.half().isfinite().all()) for x in (scale, zero))
    packing = linear.Packing(bits=bits, group_size=group_size, scales="float16" if fits else "float32")
    return linear.Levels(values=values.view(weight.shape).to(torch.uint8), scale=scale, zero=zero), packing


def torchao_levels(weight: Tensor) -> tuple[linear.Levels, linear.Packing]:
    """torchao's int8 weights: symmetric, one float32 scale per output; weight is (out, in)."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    module = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    module.weight = nn.Parameter(weight.float(), requires_grad=False)
    # Its settings for torch.compile are for the whole process, which is not ours to configure.
    quantize_(module, Int8WeightOnlyConfig(set_inductor_config=False))
    held: Any = module.weight
    values = (held.qdata.to(torch.int16) + 128).to(torch.uint8)
    packing = linear.Packing(bits=8, group_size=weight.shape[1], scales="float32", symmetric=True)
    return linear.Levels(values=values, scale=held.scale.view(-1, 1), zero=None), packing


def chosen_modules(model: Any, config: QuantizeConfig) -> dict[str, nn.Module]:
    """Path -> module, in the order of the model; refuses a model that is quantised already."""
    for path, module in model.named_modules():
        if isinstance(module, linear.QuantizedLinear):
            raise TrisectError(f"{path} is quantised already; quantise the folder that this one was made from.")
    wanted = [module for view in layer_views(model) for module in _projections(view, config.parts)]
    if config.lm_head:
        head = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise TrisectError(f"The model's head is no plain linear layer ({type(head).__name__}): no --lm-head.")
        wanted.append(head)
    chosen = {id(module) for module in wanted}
    return {path: module for path, module in model.named_modules() if id(module) in chosen}


def group_sizes(modules: dict[str, nn.Module], config: QuantizeConfig) -> dict[str, int]:
    """Path -> group size, all of them checked against the layers' inputs before anything is changed."""
    # hqq itself only asks that the size divides the number of weights, and then lets groups straddle rows.
    sizes = {}
    for path, module in modules.items():
        inputs, _ = linear.sizes_of(module)
        if config.backend == "torchao":
            sizes[path] = inputs
            continue
        fitting = [size for size in AUTO_SIZES if inputs % size == 0]
        if not fitting:
            instead = "compress with --align 8, leave the part out with --parts, or use --backend torchao --bits 8"
            raise TrisectError(f"{path} has {inputs} inputs, which no group size divides; {instead}.")
        if config.group_size is not None and inputs % config.group_size:
            wrong = f"Groups of {config.group_size} do not divide the {inputs} inputs of {path}"
            raise TrisectError(f"{wrong}; {_listed(fitting)} do, or type --group-size auto for a size per layer.")
        sizes[path] = config.group_size or fitting[0]
    return sizes


def _projections(view: LayerView, parts: tuple[str, ...]) -> list[nn.Module]:
    """The plain linear modules of the parts; one that holds maps of several parts needs all of them."""
    if view.experts is not None and "mlp" in parts:
        instead = "use --parts qk,ov, or export --to gguf --dtype q8_0, which has them in 8 bits"
        raise TrisectError(f"Layer {view.index} has experts, which hqq and torchao do not quantise: {instead}.")
    wanted = [name for part in parts for name in LINEARS[part] if name in view.linears()]
    inside = {id(module): module for name in wanted for module in view.module(name).modules()}
    for part, names in LINEARS.items():
        others = [name for name in names if name in view.linears() and part not in parts]
        if any(id(view.module(name)) in inside for name in others):
            both = f"One matrix of layer {view.index} holds maps of {part} and of {','.join(parts)}"
            raise TrisectError(f"{both}: quantise them together, --parts {','.join([*parts, part])}.")
    return [m for m in inside.values() if linear.is_linear(m) or isinstance(m, Conv1D)]


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes))


def quantize_model(
    model: Any, config: QuantizeConfig, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> Any:
    """Replace the linear modules of the decoder layers by quantised ones; the model is changed and returned.

    What can be refused is refused before anything is changed. A stock model becomes a trisect one of full
    width, so that it is saved and loaded like a compressed one.
    """
    require(config.backend)
    modules = chosen_modules(model, config)
    sizes = group_sizes(modules, config)
    for path, module in modules.items():
        linear.refuse_nan(linear.weight_of(module), path)
    if not isinstance(model, compressed.CompressedModel):
        compressed.mark_compressed(model, original=compressed.original_widths(model), method="none", ratio=0.0)
    if config.lm_head:  # it cannot share the embedding's weight any more
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
        model.all_tied_weights_keys = {}
    for done, (path, module) in enumerate(modules.items()):
        model.set_submodule(path, quantized_linear(module, config, sizes[path]))
        progress(done + 1, len(modules))
    compressed.mark_quantized(model, backend=config.backend)
    return model


@torch.no_grad()
def quantized_linear(old: nn.Module, config: QuantizeConfig, group_size: int) -> linear.QuantizedLinear:
    """One linear module, nn.Linear or GPT-2's Conv1D, in fewer bits."""
    weight: Tensor = linear.weight_of(old).T.contiguous()  # (out, in), also for GPT-2's transposed layers
    bias = linear.bias_of(old)
    if config.backend == "hqq":
        levels, packing = hqq_levels(weight, bits=config.bits, group_size=group_size)
    else:
        levels, packing = torchao_levels(weight)
    with torch.device("meta"):
        new = linear.QuantizedLinear(weight.shape[1], len(weight), packing, bias=bias is not None)
    new.fill(levels, bias)
    return new.train(old.training)


@dataclass(frozen=True, kw_only=True)
class Bits:
    """What a model takes, and what that comes to per weight."""

    decoder_bytes: int  # all matrices of the decoder layers, quantised or not, with scales and zeros; no biases
    decoder_weights: int
    original_decoder_weights: int  # before any compression
    model_bytes: int  # every tensor that is saved, embeddings and norms included
    parameters: int

    @property
    def per_weight(self) -> float:
        return 8 * self.decoder_bytes / self.decoder_weights

    @property
    def per_original_weight(self) -> float:
        """Compression and quantisation together: what one weight of the dense decoder costs."""
        return 8 * self.decoder_bytes / self.original_decoder_weights

    @property
    def per_parameter(self) -> float:
        """Of the whole model, embeddings included."""
        return 8 * self.model_bytes / self.parameters

    def to_dict(self) -> dict[str, Any]:
        """Counts and quotients, ready for JSON."""
        names = ("per_weight", "per_original_weight", "per_parameter")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}


def count_bits(model: Any) -> Bits:
    """Count a model as it stands, quantised or not."""
    now, before = budget_of(shape_of(model)), budget_of(original_shape(model))
    views = layer_views(model)
    maps = [part for view in views for name in view.linears() for part in view.module(name).modules()]
    maps += [module for view in views if view.experts is not None for module in view.projections()]
    # By id, because a fused matrix is the module of several maps.
    matrices = {id(x): x for module in maps for x in _matrices(module)}
    # By place, because what is shared is saved once.
    saved = {(x.data_ptr(), x.shape): x for x in model.state_dict().values()}
    head = model.get_output_embeddings()
    # A quantised head is no parameter, so that the budget does not count it.
    extra = math.prod(linear.sizes_of(head)) if isinstance(head, linear.QuantizedLinear) else 0
    return Bits(
        decoder_bytes=sum(x.nbytes for x in matrices.values()),
        decoder_weights=now.linear_parameters,
        original_decoder_weights=before.linear_parameters,
        model_bytes=sum(x.nbytes for x in saved.values()),
        parameters=now.parameters + extra,
    )


def _matrices(module: nn.Module) -> list[Tensor]:
    """The tensors that stand for a module's own weight."""
    if not isinstance(module, linear.QuantizedLinear):
        return linear.matrices_of(module)
    return [x for x in (module.packed, module.scale, module.zero) if x is not None]


# The KV cache: b = batch, k = key/value heads, t = tokens, d = width

LARGEST_GROUP = 64


class PackedLayer(DynamicLayer):
    """Recent tokens in full precision (`keys`, `values`), older ones packed (`packed`)."""

    is_croppable = False

    def __init__(self, *, bits: int, group_sizes: tuple[int, int], residual_length: int):
        super().__init__()
        self.bits, self.group_sizes, self.residual_length = bits, group_sizes, residual_length
        self.packed: list[list[Tensor]] = [[], []]
        """For keys and for values: bytes, scales and offsets, (b, k, t, ...) each; empty at first."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = _no_tokens(key_states), _no_tokens(value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Add new tokens and return all; new ones are returned unrounded unless `residual_length` is 0."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        if self.residual_length == 0:
            self._pack_recent()
        keys, values = (
            torch.cat([self._unpacked(side, recent.dtype), recent], dim=-2) if side else recent
            for side, recent in zip(self.packed, (self.keys, self.values), strict=True)
        )
        if self.keys.shape[-2] > self.residual_length:
            self._pack_recent()
        return keys, values

    def get_seq_length(self) -> int:
        packed = self.packed[0][0].shape[-2] if self.packed[0] else 0
        return packed + int(self.keys.shape[-2]) if self.is_initialized else 0

    def reset(self) -> None:
        self.packed = [[], []]
        self.is_initialized = False  # the next update begins with empty tensors

    def crop(self, tokens_to_remove: int) -> None:
        raise TrisectError("A quantised KV cache cannot be cropped; use the model's default cache here.")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_batch(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change_batch(lambda x: x[indices.to(x.device)])

    reorder_cache = batch_select_indices

    def _change_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
            self.packed = [[change(x) for x in side] for side in self.packed]

    def _pack_recent(self) -> None:
        for number, recent in enumerate((self.keys, self.values)):
            new, old = self._quantized(recent, self.group_sizes[number]), self.packed[number]
            self.packed[number] = [torch.cat(x, dim=-2) for x in zip(old, new, strict=True)] if old else new
        self.keys, self.values = _no_tokens(self.keys), _no_tokens(self.values)

    def _quantized(self, x: Tensor, group_size: int) -> list[Tensor]:
        levels, _ = hqq_levels(x.flatten(0, 2), bits=self.bits, group_size=group_size)  # (b k t, d)
        assert levels.zero is not None
        # An offset is of the size of the numbers themselves; a zero point may be too large for 16 bits.
        offset = -levels.zero * levels.scale
        tensors = linear.pack(levels.values, self.bits), levels.scale.half(), offset.half()
        return [tensor.unflatten(0, x.shape[:3]) for tensor in tensors]

    def _unpacked(self, side: list[Tensor], dtype: torch.dtype) -> Tensor:
        packed, scale, offset = side
        values = linear.unpack(packed.flatten(0, 2), self.bits).float()  # (b k t, d)
        groups = values.unflatten(0, packed.shape[:3]).unflatten(-1, (scale.shape[-1], -1))
        return (groups * scale.float().unsqueeze(-1) + offset.float().unsqueeze(-1)).flatten(-2).to(dtype)


def _no_tokens(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:2], 0, x.shape[3]))


def quantized_cache(model: Any, *, bits: int = 4, group_size: int | None = None, residual_length: int = 128) -> Cache:
    """An empty cache for `model.generate(..., past_key_values=cache)`, quantised by HQQ.

    Channels of one head of one token share a scale: `group_size` of them, or by default the most that divide
    the head's width, 64 at most. The last tokens, up to `residual_length`, are held as they are.
    """
    if bits not in linear.BITS:
        raise TrisectError(f"Cannot hold a KV cache in {bits} bits; use one of {_listed(linear.BITS)}.")
    if residual_length < 0:
        raise TrisectError(f"residual_length must be 0 or more, got {residual_length}.")
    require("hqq")
    seen = DynamicCache()  # of one token, for the widths that each layer caches
    with torch.no_grad():
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        model(input_ids=token, past_key_values=seen, use_cache=True)
    layers = []
    for index, layer in enumerate(seen.layers):
        keys, values = (_fitting(index, x.shape[-1], group_size) for x in (layer.keys, layer.values))
        layers.append(PackedLayer(bits=bits, group_sizes=(keys, values), residual_length=residual_length))
    return Cache(layers=layers)


def _fitting(index: int, width: int, asked: int | None) -> int:
    sizes = [size for size in range(LARGEST_GROUP, 0, -8) if width % size == 0]
    if not sizes:
        raise TrisectError(f"Layer {index} caches heads {width} wide, no multiple of 8; compress with --align 8.")
    if asked is not None and asked not in sizes:
        wrong = f"Groups of {asked} do not divide the cached heads of layer {index}, {width} wide"
        raise TrisectError(f"{wrong}; use {_listed(sizes)}, or leave group_size out.")
    return asked or sizes[0]


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values that a transformers cache holds, packed ones with scales and offsets included."""
    whole = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    packed = [x for layer in cache.layers for side in getattr(layer, "packed", ()) for x in side]
    return sum(x.nbytes for x in (*whole, *packed) if isinstance(x, Tensor))
