"""A GGUF file for llama.cpp: what that computes under each name, and the file, read back before it gets its name."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor

from trisect.errors import TrisectError, check_names
from trisect.export import hf, vocabulary
from trisect.export.stock import SAME, Stock, check_exportable, stock_factors, stock_weights
from trisect.models import family_for
from trisect.models.heads import ropes_of
from trisect.support import replaced
from trisect.support.files import check_disk_space, check_writable, new_file


@dataclass(frozen=True)
class Architecture:
    """What llama.cpp computes under one name."""

    name: str
    halved: bool = False  # its channels are paired as in Hugging Face, and it reads no list of frequencies
    square: bool = False  # its heads are together as wide as the residual stream
    normalised: bool | None = None  # the weights of a token's experts are made to add up to one; None without any
    activation: str = "silu"
    pattern: int = 0  # it knows sliding windows, and each layer of this many looks at everything; 0 without
    yarn: bool = False  # it stretches rotations by YaRN
    width: str | None = None  # its name for the width of experts, where it is not the usual one of the config's
    biased: bool = False  # its attention has biases
    numbers: tuple[tuple[str, str], ...] = ()  # more entries of the file: GGUFWriter's name, the config's


SCALES = (
    ("attention_scale", "attention_multiplier"),
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
)
WINDOW = (("sliding_window", "sliding_window"),)
ARCHITECTURES = {  # by family
    **dict.fromkeys(("llama", "mistral", "qwen2", "phi3"), Architecture("llama")),
    "qwen3": Architecture("qwen3", halved=True),
    "mixtral": Architecture("llama", normalised=True),
    "qwen3_moe": Architecture("qwen3moe", halved=True, normalised=True),
    "qwen2_moe": Architecture("qwen2moe", halved=True, square=True, normalised=False),
    "olmo2": Architecture("olmo2", halved=True, square=True),
    "granite": Architecture("granite", numbers=SCALES),
    "granitemoe": Architecture("granitemoe", normalised=True, numbers=SCALES),
    "gemma3_text": Architecture("gemma3", halved=True, activation="gelu_pytorch_tanh", pattern=6, numbers=WINDOW),
    "gpt_oss": Architecture(
        "gpt-oss",
        halved=True,
        normalised=True,
        pattern=2,
        yarn=True,
        biased=True,
        width="expert_feed_forward_length",
        numbers=WINDOW,
    ),
}
LOCAL_BASE, CLAMP = 10_000.0, 7.0  # of Gemma 3's local rotations and gpt-oss's gates, whatever the file says
WIDTHS = {
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
"""Widths by their names in a config -> in llama.cpp's file."""


def known_architecture(config: Any) -> Architecture:
    """llama.cpp's for a config, or a refusal."""
    family = family_for(config).name
    if family not in ARCHITECTURES:
        written = ", ".join(ARCHITECTURES)
        raise TrisectError(f"trisect writes no GGUF files of {family} models, only of {written}; use --to hf.")
    return ARCHITECTURES[family]


def check_computed(config: Any, stock: Stock, *, listed: bool) -> None:
    """Refuse what llama.cpp would compute otherwise; `listed` says that frequencies need a list."""
    known = known_architecture(config)
    for what, true in _differences(config, stock, known, listed=listed).items():
        if true:
            raise TrisectError(f"llama.cpp's {known.name} {what}; use --to hf.")


def _differences(config: Any, stock: Stock, known: Architecture, *, listed: bool) -> dict[str, bool]:
    """What llama.cpp does, and whether this model does something else."""
    activation = getattr(config, "hidden_act", None) or config.hidden_activation
    width = stock.head_width * config.num_attention_heads
    found = {
        f"computes {activation!r} MLPs as {known.activation}": activation != known.activation,
        "takes no list of frequencies, and this model's are scaled": known.halved and listed,
        "has heads as wide as the residual stream together": known.square and width != config.hidden_size,
    }
    if known.normalised is not None:
        dense, norm = set(range(config.num_hidden_layers)) - stock.mixtures, getattr(config, "norm_topk_prob", None)
        sums = f"{'makes' if known.normalised else 'does not make'} the weights of a token's experts add up to one"
        found[f"has experts in every layer, and layer {min(dense, default=0)} of this model has one MLP"] = bool(dense)
        found[f"{sums}, and norm_topk_prob is {norm} here"] = norm not in (None, known.normalised)
    return found | {f"has {what}, whatever the file says": not true for what, true in _granted(config, known).items()}


def _granted(config: Any, known: Architecture) -> dict[str, bool]:
    """What llama.cpp takes for granted of models with sliding windows, and whether it holds."""
    if not known.pattern:
        return {}
    whole = [(number + 1) % known.pattern == 0 for number in range(len(config.layer_types))]
    kinds = ("default", "yarn") if known.yarn else ("default",)
    local = config.rope_parameters.get("sliding_attention", {}).get("rope_theta", LOCAL_BASE)
    scale, clamp = getattr(config, "query_pre_attn_scalar", config.head_dim), getattr(config, "swiglu_limit", CLAMP)
    pattern = f"one layer in {known.pattern} that looks at everything"
    return {
        pattern: whole == [kind == "full_attention" for kind in config.layer_types],
        f"rotations of the kind {' or '.join(kinds)}": all(rope["rope_type"] in kinds for rope in ropes_of(config)),
        "local rotations to the base 10000": local == LOCAL_BASE,
        "scores over the root of the head width": scale == config.head_dim,
        "gates clamped at 7": clamp == CLAMP,
        "biases in attention": not known.biased or config.attention_bias,
    }


FACTORS = "rope_freqs.weight"
BLOCK = 32  # weights that share one scale in q8_0: a row must be a whole number of them
ROUTER = "ffn_gate_inp"  # stays float32 as llama.cpp's own converter has it: a rounded router sends tokens elsewhere


@dataclass(frozen=True)
class Kind:
    """How weights are held in the file."""

    ggml: gguf.GGMLQuantizationType
    dtype: Any  # numpy's
    file_type: gguf.LlamaFileType
    loss: float  # the largest error of a matrix, relative to its norm, that this explains


KINDS = {
    "f32": Kind(gguf.GGMLQuantizationType.F32, np.float32, gguf.LlamaFileType.ALL_F32, 0.0),
    "f16": Kind(gguf.GGMLQuantizationType.F16, np.float16, gguf.LlamaFileType.MOSTLY_F16, 1e-3),
    "q8_0": Kind(gguf.GGMLQuantizationType.Q8_0, np.uint8, gguf.LlamaFileType.MOSTLY_Q8_0, 2e-2),
}


def export_gguf(
    model: Any, tokenizer: Any, out: str | Path, *, kind: str = "f16", receipt: dict[str, Any] | None = None
) -> hf.Exported:
    """Write a model, given in float32, as one GGUF file for llama.cpp."""
    check_names("kind of GGUF weights", [kind], KINDS, "float32 and the like are for --to hf.")
    path = Path(out) if Path(out).suffix == ".gguf" else Path(out) / f"model-{kind}.gguf"
    if path.exists():
        raise TrisectError(f"The output {path} exists; name another with -o, or remove it.")
    check_writable(path)
    check_exportable(model)
    config = model.config
    tokenizer, notes = vocabulary.split_digits(tokenizer)
    entries = vocabulary.vocabulary_of(tokenizer, config.vocab_size)
    known = known_architecture(config)
    stock = stock_weights(model, baked=not known.pattern)
    check_computed(config, stock, listed=rotation_factors(config, stock) is not None)
    architecture = "deci" if needs_deci(config, stock) else known.name
    apart = hf.check_stock(hf.stock_config(config, stock), stock, hf.probe(model))
    check_disk_space(path, int(1.1 * sum(4 * t.numel() for t in stock.tensors.values())))
    makers = file_tensors(config, stock)
    kinds = {name: _kind_of(name, make().shape, kind) for name, make in makers.items()}
    with new_file(path) as unnamed:
        writer = gguf.GGUFWriter(unnamed, architecture)
        for name, value in (_facts(config, stock, receipt or {}, kind) | entries).items():
            getattr(writer, f"add_{name}")(value)
        _write_tensors(writer, makers, kinds)
        check_written(unnamed, makers, kinds)
        with _turning_as_llama_cpp(model):
            nats = hf.check_in_llama_cpp(unnamed, model, kind, longest=_longest(config), mixture=bool(stock.mixtures))
    kept = list(kinds.values()).count("f16") if kind == "q8_0" else 0
    return hf.Exported(
        path=path,
        architecture=architecture,
        head_width=stock.head_width,
        mlp_widths=stock.mlp_widths,
        dtype=kind,
        difference=apart,
        llama_cpp=nats,
        notes=(*_notes(config, stock, kept), *notes),
    )


def _turning_as_llama_cpp(model: Any) -> AbstractContextManager[None]:
    """With YaRN's range in whole channels, as llama.cpp has it; a note says so where the model has it otherwise."""
    if not _rounds_range(model.config):
        return nullcontext()
    config, table = deepcopy(model.config), model.model.rotary_emb
    config.rope_parameters = {**config.rope_parameters, "truncate": True}
    rounded = type(table)(config).to(next(model.parameters()).device)
    return replaced((model.model, "rotary_emb", rounded))


def _rounds_range(config: Any) -> bool:
    return bool(_stretch(config)) and not config.rope_parameters.get("truncate", True)


def _facts(config: Any, stock: Stock, receipt: dict[str, Any], kind: str) -> dict[str, Any]:
    """The architecture in numbers, by the names that GGUFWriter's `add_` methods have."""
    recipe = receipt.get("recipe") or {}
    method = f"trisect, method {recipe['method']}, ratio {recipe.get('ratio')}" if recipe.get("method") else None
    per_layer, layers = needs_deci(config, stock), config.num_hidden_layers
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return {
        "name": f"{config.model_type.removeprefix('trisect_')} compressed with trisect",
        **({} if method is None else {"description": method}),
        "file_type": KINDS[kind].file_type,
        "quantization_version": gguf.GGML_QUANT_VERSION,
        "vocab_size": config.vocab_size,
        "context_length": _longest(config),
        "embedding_length": config.hidden_size,
        "block_count": layers,
        **_widths(config, stock, per_layer=per_layer),
        "head_count": [heads] * layers if per_layer else heads,
        "head_count_kv": [kv_heads] * layers if per_layer else kv_heads,
        "key_length": stock.head_width,
        "value_length": stock.head_width,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_dimension_count": stock.head_width,
        "rope_freq_base": _base(config),
        **{name: getattr(config, setting) for name, setting in known_architecture(config).numbers},
        **_stretch(config),
    }


def _stretch(config: Any) -> dict[str, Any]:
    """How rotations are stretched, for an architecture that is told so."""
    rope = config.rope_parameters
    if not known_architecture(config).yarn or rope["rope_type"] != "yarn":
        return {}
    return {
        "rope_scaling_type": gguf.RopeScalingType.YARN,
        "rope_scaling_factor": rope["factor"],
        "rope_scaling_orig_ctx_len": rope["original_max_position_embeddings"],
    }


def _base(config: Any) -> float:
    """Of the rotation; of the layers that look at everything, where there are two."""
    rope = config.rope_parameters
    return float(rope.get("full_attention", rope)["rope_theta"])


def _widths(config: Any, stock: Stock, *, per_layer: bool) -> dict[str, Any]:
    """Widths of MLPs, and how many experts there are of them."""
    if per_layer:
        return {"feed_forward_length": list(stock.mlp_widths)}
    widths = {"intermediate_size": config.intermediate_size, **stock.widths}
    found = {known_architecture(config).width or WIDTHS[name]: width for name, width in widths.items()}
    if stock.mixtures:
        found |= {"expert_count": stock.experts, "expert_used_count": config.num_experts_per_tok}
    return found


def _longest(config: Any) -> int:
    """Tokens of a text that llama.cpp computes as the model does."""
    return min(int(config.max_position_embeddings), _window(config) or 1 << 31)


def _window(config: Any) -> int | None:
    """Tokens that attention looks back over, where not all layers look at everything."""
    types = getattr(config, "layer_types", None)
    if known_architecture(config).pattern or (types is not None and "sliding_attention" not in types):
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def _notes(config: Any, stock: Stock, kept: int) -> tuple[str, ...]:
    window, width = _window(config), stock.head_width
    short = window is not None and window < config.max_position_embeddings
    notes = {
        f"llama.cpp ignores the sliding window, so the file allows texts of {window} tokens only": short,
        "llama.cpp rounds the range that YaRN blends over, in every file of this family: the check does, too": (
            _rounds_range(config)
        ),
        f"{kept} matrices stay f16: their rows are no multiple of {BLOCK}, as q8_0 needs": kept,
        f"head width {width} is no multiple of {BLOCK}: the KV cache cannot be quantised": width % BLOCK,
        **({} if needs_deci(config, stock) else dict.fromkeys(hf.padding_notes(stock), True)),
        "transformers ignores rope_freqs when it loads GGUF; for transformers, export --to hf": (
            rotation_factors(config, stock) is not None
        ),
    }
    return tuple(note for note, true in notes.items() if true)


def file_tensors(config: Any, stock: Stock) -> dict[str, Callable[[], Tensor]]:
    """llama.cpp's name -> what makes the tensor, in the order in which they are written."""
    factors = rotation_factors(config, stock)
    experts = family_for(config).experts
    tensors = parted(stock.tensors, interleaved=experts is not None and experts.interleaved)
    makers: dict[str, Callable[[], Tensor]] = {} if factors is None else {FACTORS: partial(Tensor, factors)}
    theirs = names_of(config, tensors, mixture=bool(stock.mixtures))
    return makers | {theirs[name]: partial(_native, name, tensors[name], config, stock) for name in theirs}


def names_of(config: Any, names: Iterable[str], *, mixture: bool) -> dict[str, str]:
    """Name in the checkpoint -> llama.cpp's name."""
    # Llama's names are those of these two, which have every tensor that it has or could have.
    own = next(arch for arch, title in gguf.MODEL_ARCH_NAMES.items() if title == known_architecture(config).name)
    both = own == gguf.MODEL_ARCH.LLAMA or (mixture and not known_architecture(config).numbers)
    kinds = (gguf.MODEL_ARCH.QWEN3, gguf.MODEL_ARCH.QWEN2MOE) if both else (own, own)
    tables = [gguf.get_tensor_name_map(kind, config.num_hidden_layers) for kind in kinds]
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    found = {}
    for name in (name for name in names if name not in tied):
        usual = name.replace("block_sparse_moe", "mlp")
        known = [table.get_name(usual, try_suffixes=(".weight", ".bias")) for table in tables]
        theirs = str(known[0] or known[1])
        found[name] = theirs if theirs.endswith((".weight", ".bias")) else f"{theirs}.weight"
    return found


def _kind_of(theirs: str, shape: Sequence[int], kind: str) -> str:
    """How a tensor is held where `kind` was asked for."""
    if theirs == FACTORS or len(shape) == 1 or ROUTER in theirs or theirs.endswith(".bias"):
        return "f32"
    return "f16" if kind == "q8_0" and shape[-1] % BLOCK else kind


def _write_tensors(writer: Any, makers: dict[str, Callable[[], Tensor]], kinds: dict[str, str]) -> None:
    """Write all weights, none made before its turn."""
    for name, make in makers.items():  # all are listed before the first is written
        shape, held = tuple(make().shape), KINDS[kinds[name]]
        if kinds[name] == "q8_0":
            shape = gguf.quant_shape_to_byte_shape(shape, held.ggml)
        size = int(np.prod(shape)) * np.dtype(held.dtype).itemsize
        writer.add_tensor_info(name, shape, np.dtype(held.dtype), size, raw_dtype=held.ggml)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, make in makers.items():
        writer.write_tensor_data(gguf.quants.quantize(_array(make()), KINDS[kinds[name]].ggml))
    writer.close()


def _array(x: Tensor) -> Any:
    return x.contiguous().float().cpu().numpy()


def check_written(path: Path, makers: dict[str, Callable[[], Tensor]], kinds: dict[str, str]) -> None:
    """Refuse a file whose weights, read back, are not the ones that were to be written."""
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    if odd := sorted(set(found) ^ set(makers)):
        raise hf.mistake(f"The GGUF file misses or invents {odd[0]}")
    for name, make in makers.items():
        array, kind = _array(make()), kinds[name]
        back = gguf.quants.dequantize(found[name].data, found[name].tensor_type)
        error = float(np.linalg.norm(back - array)) / max(float(np.linalg.norm(array)), 1e-30)
        if not error <= KINDS[kind].loss:
            what = f"{name} came back from the GGUF file with an error of {error:.2g}"
            raise hf.mistake(f"{what}, where {kind} explains {KINDS[kind].loss:g}")


def rotation_factors(config: Any, stock: Stock) -> list[float] | None:
    """Divisors of llama.cpp's own frequencies, None where those are the model's."""
    if stock.rates is None:
        return None
    factors = stock_factors(stock.rates, _base(config))
    return None if max(abs(factor - 1) for factor in factors) <= SAME else factors


def needs_deci(config: Any, stock: Stock) -> bool:
    """llama.cpp reads MLP widths per layer for this architecture; its biases are sized for whole heads."""
    special = any(name.endswith(".bias") or "_norm." in name for name in stock.tensors)
    special = special or known_architecture(config).name != "llama"
    return len(set(stock.mlp_widths)) > 1 and not special and not stock.mixtures


def _native(name: str, tensor: Tensor, config: Any, stock: Stock) -> Tensor:
    """A tensor in llama.cpp's order of channels, and no wider than its layer needs."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    kind = name.split(".")[-2]
    if kind.endswith("norm"):
        return tensor + family_for(config).norm_offset
    if kind in heads and not known_architecture(config).halved:
        return interleaved(tensor, heads[kind])
    if ".mlp." in name and needs_deci(config, stock):
        width = stock.mlp_widths[int(name.split(".")[2])]
        return tensor[:, :width] if ".down_proj." in name else tensor[:width]
    return tensor


EXPERTS = {"_proj": ".weight", "_proj_bias": ".bias"}  # endings of experts' tensors -> of llama.cpp's kind


def parted(tensors: dict[str, Tensor], *, interleaved: bool = False) -> dict[str, Tensor]:
    """Gate and up of all experts of a layer (E, 2 I, D) as tensors of their own; what has no experts as it is."""
    # Interleaved ones are stored (in, out), with gate and up taking turns.
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition("experts.")
        maps, _, ending = last.partition("_proj")
        if not prefix or f"_proj{ending}" not in EXPERTS:
            found[name] = tensor
            continue
        x = tensor.mT if interleaved and tensor.ndim == 3 else tensor
        halves = (x[:, ::2], x[:, 1::2]) if interleaved else x.chunk(2, dim=1)
        pieces = {"gate": halves[0], "up": halves[1]} if maps == "gate_up" else {maps: x}
        found |= {f"{prefix}experts.{which}_proj{EXPERTS[f'_proj{ending}']}": y for which, y in pieces.items()}
    return found


def interleaved(x: Tensor, heads: int) -> Tensor:
    """Rows (heads 2n, ...): from [firsts | seconds] of each head to adjacent pairs, as llama.cpp has them."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
