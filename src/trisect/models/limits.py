"""What a config may ask for, checked before a library makes lists and tensors of that size.

Bounds are far above every model there is. Whether the sizes are the right ones is known once they are held
against the weights: `check_fits`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from trisect.errors import TrisectError
from trisect.support.checks import is_number, shown

LARGEST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 512),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 1 << 20),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 1 << 22),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads"), 1 << 14),
    **dict.fromkeys(("head_dim", "image_size", "patch_size", "num_channels"), 1 << 14),
    **dict.fromkeys(("vocab_size", "num_labels"), 1 << 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 1 << 30),
}
"""Counts by their name in a config, all of 1 or more, and the most that is believed."""
POSITIVE = ("rope_theta", "rotary_emb_base", "factor", "layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps")
SHARES = ("partial_rotary_factor", "rotary_pct")
DTYPES = ("float64", "float32", "float16", "bfloat16", "auto")
ATTENTIONS = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
)
UNSET = ("per_layer_config", "output_attentions", "is_encoder_decoder", "add_cross_attention", "torchscript")
"""Settings that change what a model is or returns, in ways that stock code half follows."""
ELSEWHERE = ("trisect", "quantization_config")
"""Entries with readers of their own."""

SPARE_BUFFERS = 1 << 26
"""Elements that tables which no file holds (rotation frequencies, masks) may have."""
PACKED = 8
"""Weights that a byte of a quantised file may stand for."""


def check_config(raw: Any, *, where: str) -> None:
    """Refuse a config whose sizes are no sizes, or that asks for code and files of its own."""
    if not isinstance(raw, Mapping):
        raise TrisectError(f"{where} holds no mapping, so it is no config of a model.")
    for key, value in _entries(raw):
        if value is None:
            continue
        if key in LARGEST:
            _check_count(where, key, value)
        elif key in POSITIVE and not (is_number(value) and 0 < value < math.inf):
            raise TrisectError(f"{where}: {key} must be a number above 0, not {shown(value)}.")
        elif key in SHARES and not (is_number(value) and 0 < value <= 1):
            raise TrisectError(f"{where}: {key} must be above 0 and at most 1, not {shown(value)}.")
        elif key in ("dtype", "torch_dtype"):
            _check_name(where, key, str(value).removeprefix("torch."), DTYPES)
        elif key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
            # Any other name is a hub repository to transformers, whose code it would fetch and run.
            _check_name(where, key, value, ATTENTIONS)
        elif (key in UNSET and value) or (key == "return_dict" and not value):
            raise TrisectError(f"{where} sets {key}, which no family here is read with; remove it.")
        elif key in ("transformers_weights", "experts_implementation", "_experts_implementation"):
            raise TrisectError(f"{where} chooses other files or code ({key}: {shown(value)}); refused.")


def check_heads(config: Any, *, where: str) -> None:
    """Query heads share key heads evenly; transformers rounds down and computes something else."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    shared = getattr(text, "num_key_value_heads", None) or heads
    if heads is not None and shared is not None and heads % shared:
        raise TrisectError(f"{where}: {heads} query heads cannot share {shared} key heads evenly.")


def check_position_scale(config: Any, *, where: str) -> None:
    """Families that scale queries by position say how with their rotations."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    needed = {"llama_4_scaling_beta", "original_max_position_embeddings"}
    if not all(is_number(rope.get(key)) and rope[key] > 0 for key in needed):
        raise TrisectError(f"{where}: rope_parameters needs numbers for {' and '.join(sorted(needed))}.")


def check_layers(config: Any, tensors: int, *, where: str) -> None:
    """Every layer has weights of its own, so there are no more layers than tensors."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0) or 0
    if layers > tensors:
        raise TrisectError(f"{where} says {layers:,} layers, but the weights are only {tensors:,} tensors.")


def check_fits(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], *, size: int, packed: bool, where: str
) -> None:
    """Refuse a model, built on the meta device, that weight files of these tensors could not fill."""
    stored = sum(math.prod(shape) for shape in shapes.values())
    # Tied weights are one parameter here and one tensor in the files, or two.
    needed = sum(parameter.numel() for parameter in model.parameters())
    if needed > (PACKED * size if packed else stored):
        raise TrisectError(
            f"{where} describes {needed:,} weights, but the files hold {stored:,}{_first_odd(model, shapes)}."
        )
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


def _check_count(where: str, key: str, value: Any) -> None:
    """One count, or one for every layer or head as some families have them."""
    values = value if isinstance(value, list) else [value]
    if not all(type(entry) is int and 1 <= entry <= LARGEST[key] for entry in values):
        raise TrisectError(
            f"{where}: {key} must be a whole number from 1 to {LARGEST[key]:,}, not {shown(value)}."
        )


def _check_name(where: str, key: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise TrisectError(f"{where}: {key} must be one of {', '.join(known)}, not {shown(value)}.")
