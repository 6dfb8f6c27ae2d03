"""What a config.json may ask for, checked before a library makes lists and tensors of that size.

Bounds are far above every model there is. Whether the sizes are the right ones is known once they are held
against the weights: `check_fits`.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.functional_validators import AfterValidator, BeforeValidator, model_validator
from torch import nn

from trisect.errors import TrisectError
from trisect.models import Family, compressed
from trisect.models.linear import BITS, SCALES, Packing
from trisect.records import plan, shapes
from trisect.support.checks import first_problem, is_number, shown

DTYPES = ("float64", "float32", "float16", "bfloat16", "auto")
FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
ATTENTIONS = ("eager", "sdpa", *FLASH, "flex_attention")  # transformers would run a hub repository of other name
UNSET = ("output_attentions", "is_encoder_decoder", "add_cross_attention", "torchscript")
"""Settings that change what a model is or returns, in ways that stock code half follows."""
PER_LAYER = "per_layer_config"  # settings of single layers: stock code of Gemma 4 reads them, other code half
OTHER_CODE = ("transformers_weights", "experts_implementation", "_experts_implementation")
ELSEWHERE = ("trisect", "quantization_config")  # entries with readers of their own
SPARE_BUFFERS = 1 << 26  # elements that tables which no file holds (rotation frequencies, masks) may have
PACKED = 8  # weights that a byte of a quantised file may stand for


def _count(most: int) -> Any:
    """One count, or one for every layer or head as some families have them."""
    one = Annotated[int, Field(strict=True, ge=1, le=most)]
    return one | list[one]


Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, gt=0, le=1)]
DtypeName: Any = Annotated[Literal[DTYPES], BeforeValidator(lambda value: str(value).removeprefix("torch."))]
TYPES: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _count(512)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), _count(1 << 20)),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), _count(1 << 22)),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads"), _count(1 << 14)),
    **dict.fromkeys(("head_dim", "image_size", "patch_size", "num_channels"), _count(1 << 14)),
    **dict.fromkeys(("vocab_size", "num_labels"), _count(1 << 24)),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), _count(1 << 30)),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "factor"), Positive),
    **dict.fromkeys(("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps"), Positive),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), Share),
    **dict.fromkeys(("dtype", "torch_dtype"), DtypeName),
    **dict.fromkeys(("attn_implementation", "_attn_implementation"), Literal[ATTENTIONS]),
    "_attn_implementation_internal": Literal[ATTENTIONS],
}
"""What a setting may be, by its name in a config or in a config inside it."""
CHECKS = {name: TypeAdapter(kind) for name, kind in TYPES.items()}


def check_config(raw: Any, *, where: str) -> None:
    """Refuse a config whose sizes are no sizes, or that asks for code and files of its own."""
    if not isinstance(raw, Mapping):
        raise TrisectError(f"{where} holds no mapping, so it is no config of a model.")
    for key, value in _entries(raw):
        if value is None:
            continue
        if key in CHECKS:
            try:
                CHECKS[key].validate_python(value)
            except ValidationError as error:
                raise TrisectError(f"{where}: {key}: {error.errors()[0]['msg']}, not {shown(value)}.") from error
        elif key == "is_encoder_decoder" and value:
            raise TrisectError(f"{where} is an encoder-decoder's; trisect narrows decoder-only language models.")
        elif key == PER_LAYER and value and "gemma4" not in str(raw.get("model_type")):
            raise TrisectError(f"{where} sets {key}, which only Gemma 4 is read with; remove it.")
        elif (key in UNSET and value) or (key == "return_dict" and not value):
            raise TrisectError(f"{where} sets {key}, which no family here is read with; remove it.")
        elif key in OTHER_CODE:
            raise TrisectError(f"{where} chooses other files or code ({key}: {shown(value)}); refused.")


def _entries(raw: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key with its value, those of configs inside a config too."""
    todo: list[Any] = [raw]
    while todo:
        found = todo.pop()
        if isinstance(found, Mapping):
            yield from found.items()
            todo += [value for key, value in found.items() if key not in ELSEWHERE]
        elif isinstance(found, list):
            todo += found


def check_attention(config: Any, family: Family, *, where: str) -> None:
    """Refuse heads that transformers would round down, and a scale by position without its numbers."""
    text = config.get_text_config()
    for layer in text.per_layer_config if family.lends_keys else [text]:
        heads = getattr(layer, "num_attention_heads", None)
        shared = getattr(layer, "num_key_value_heads", None) or heads
        if heads is not None and shared is not None and heads % shared:
            raise TrisectError(f"{where}: {heads} query heads cannot share {shared} key heads evenly.")
    rope = getattr(text, "rope_parameters", None) or {}
    needed = ("llama_4_scaling_beta", "original_max_position_embeddings")
    if family.position_scale == "rotated" and not all(is_number(rope.get(key)) and rope[key] > 0 for key in needed):
        raise TrisectError(f"{where}: rope_parameters needs numbers for {' and '.join(needed)}.")


def check_layers(config: Any, tensors: int, *, where: str) -> None:
    """Every layer has weights of its own, so there are no more layers than tensors."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0) or 0
    if layers > tensors:
        raise TrisectError(f"{where} says {layers:,} layers, but the weights are only {tensors:,} tensors.")


def check_fits(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], *, size: int, packed: bool, where: str) -> None:
    """Refuse a model, built on the meta device, that weight files of these tensors could not fill."""
    stored = sum(math.prod(shape) for shape in shapes.values())
    # Tied weights are one parameter here and one tensor in the files, or two.
    needed = sum(parameter.numel() for parameter in model.parameters())
    if needed > (PACKED * size if packed else stored):
        odd = _first_odd(model, shapes)
        raise TrisectError(f"{where} describes {needed:,} weights, but the files hold {stored:,}{odd}.")
    tables = sum(buffer.numel() for buffer in model.buffers())
    if tables > PACKED * size + SPARE_BUFFERS:
        raise TrisectError(f"{where} asks for tables of {tables:,} numbers; refused.")


def _first_odd(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The first parameter that the files do not have as the config has it."""
    for name, parameter in model.named_parameters():
        if name not in shapes:
            return f": there are no weights for {name}"
        if shapes[name] != parameter.shape:
            return f": {name} does not fit (file {shapes[name]}, config {tuple(parameter.shape)})"
    return ""


@dataclass(frozen=True, kw_only=True)
class LayerEntry(shapes.LayerWidths):
    """What a layer became; 0 where it has no attention or no MLP."""

    shared_output: bool = False
    folded: bool = False
    dropped_experts: int = 0
    linears: tuple[shapes.LinearShape, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what no layer can be; whether this one fits the model is known once that is built."""
        for record in (self, *self.linears):
            plan.with_widths(record)
        if (self.qk == 0) != (self.vo == 0) or 2 * self.pairs > self.qk:
            raise ValueError("impossible widths")
        if len({one.name for one in self.linears}) != len(self.linears):
            raise ValueError("a map is factored twice")


class QuantizationEntry(BaseModel):
    """The quantised modules of a model."""

    modules: dict[str, Packing]

    @model_validator(mode="after")
    def _possible(self) -> "QuantizationEntry":
        for path, held in self.modules.items():
            if held.bits not in BITS or held.scales not in SCALES or not 0 < held.group_size <= plan.WIDEST:
                what = f"{held.bits} bits, groups of {held.group_size}, scales {shown(held.scales)}"
                raise ValueError(f"{path[:80]} has {what}; known are bits {BITS} and scales {tuple(SCALES)}")
        return self


class TrisectEntry(BaseModel):
    """The `trisect` entry of a compressed model's config.json."""

    model_config = ConfigDict(strict=True)

    format: int
    method: Annotated[str, Field(max_length=100)]
    ratio: Annotated[float, Field(ge=0, le=1)]
    original: list[Annotated[shapes.LayerWidths, AfterValidator(plan.with_widths)]]
    layers: list[LayerEntry]
    dropped_layers: list[Annotated[int, Field(ge=0)]] = []
    quantization: QuantizationEntry | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "TrisectEntry":
        if not self.method.isprintable():
            raise ValueError("the method must be a name")
        if len(self.original) != len(self.layers):
            raise ValueError(f"{len(self.original)} original layers became {len(self.layers)}")
        gone = self.dropped_layers
        if gone != sorted(set(gone)) or max(gone, default=0) >= len(self.layers) + len(gone):
            raise ValueError("dropped_layers must be numbers of the original layers, in order")
        if self.format == compressed.FORMAT and any(layer.folded or layer.linears for layer in self.layers):
            raise ValueError(f"format {compressed.FORMAT} has no folded rotations and no factored maps")
        return self


def check_entry(entry: Any) -> None:
    """Refuse a `trisect` entry of config.json that trisect did not write."""
    compressed.check_format(entry)
    try:
        TrisectEntry.model_validate_json(json.dumps(entry))
    except ValidationError as error:
        raise TrisectError(f"config.json: trisect: {first_problem(error)}") from error
