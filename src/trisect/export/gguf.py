"""A GGUF file for llama.cpp, written tensor by tensor and read back before it gets its name."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from trisect.errors import TrisectError, unknown_name
from trisect.export.check import Exported, check_in_llama_cpp, check_same, difference, probe
from trisect.export.hf import built, check_stock, padding_notes, stock_config
from trisect.export.rotation import SAME, listed_rope, stock_factors
from trisect.export.stock import Stock, check_exportable, plain_config, stock_weights
from trisect.export.vocabulary import split_digits, vocabulary_of
from trisect.models import family_for
from trisect.support.files import check_disk_space, check_writable, new_file

FACTORS = "rope_freqs.weight"
BLOCK = 32
"""Weights that share one scale in q8_0: a row must be a whole number of them."""
ROUTER = "ffn_gate_inp"
"""Stays float32 as llama.cpp's own converter has it: a rounded router sends tokens elsewhere."""


@dataclass(frozen=True)
class Architecture:
    """What llama.cpp computes under one name."""

    name: str
    halved: bool = False
    """Its channels are paired as in Hugging Face, and it reads no list of frequencies."""
    square: bool = False
    """Its heads are together as wide as the residual stream."""
    normalised: bool | None = None
    """Whether the weights of a token's experts are made to add up to one; None without experts."""
    activation: str = "silu"
    windows: bool = False
    """It knows sliding windows, and two rotations."""
    numbers: tuple[tuple[str, str], ...] = ()
    """More entries of the file: GGUFWriter's name, the config's."""


ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "phi3"), Architecture("llama")),
    "qwen3": Architecture("qwen3", halved=True),
    "mixtral": Architecture("llama", normalised=True),
    "qwen3_moe": Architecture("qwen3moe", halved=True, normalised=True),
    "qwen2_moe": Architecture("qwen2moe", halved=True, square=True, normalised=False),
    "olmo2": Architecture("olmo2", halved=True, square=True),
    "granite": Architecture(
        "granite",
        numbers=(
            ("attention_scale", "attention_multiplier"),
            ("embedding_scale", "embedding_multiplier"),
            ("residual_scale", "residual_multiplier"),
            ("logit_scale", "logits_scaling"),
        ),
    ),
    "gemma3_text": Architecture(
        "gemma3",
        halved=True,
        activation="gelu_pytorch_tanh",
        windows=True,
        numbers=(("sliding_window", "sliding_window"),),
    ),
}
"""By family."""
LOCAL_BASE, PATTERN = 10_000.0, 6
"""What llama.cpp takes for granted of Gemma 3: the base of local rotations; every sixth layer looks at all."""
WIDTHS = {
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
"""Widths by their names in a config -> in llama.cpp's file."""


@dataclass(frozen=True)
class Kind:
    """How weights are held in the file."""

    ggml: gguf.GGMLQuantizationType
    dtype: Any
    """numpy's."""
    file_type: gguf.LlamaFileType
    loss: float
    """The largest error of a matrix, relative to its norm, that this explains."""


KINDS = {
    "f32": Kind(gguf.GGMLQuantizationType.F32, np.float32, gguf.LlamaFileType.ALL_F32, 0.0),
    "f16": Kind(gguf.GGMLQuantizationType.F16, np.float16, gguf.LlamaFileType.MOSTLY_F16, 1e-3),
    "q8_0": Kind(gguf.GGMLQuantizationType.Q8_0, np.uint8, gguf.LlamaFileType.MOSTLY_Q8_0, 2e-2),
}


def export_gguf(
    model: Any, tokenizer: Any, out: str | Path, *, kind: str = "f16", receipt: dict[str, Any] | None = None
) -> Exported:
    """Write a model, given in float32, as one GGUF file for llama.cpp."""
    if kind not in KINDS:
        raise unknown_name("kind of GGUF weights", kind, KINDS, "float32 and the like are for --to hf.")
    path = _file(Path(out), kind)
    check_exportable(model)
    config = model.config
    tokenizer, notes = split_digits(tokenizer)
    vocabulary = vocabulary_of(tokenizer, config.vocab_size)
    known = _known(config)
    stock = stock_weights(model, baked=not known.windows)
    architecture = _architecture(config, stock)
    expected = probe(model)
    apart = check_stock(stock_config(config, stock), stock, expected)
    offset = family_for(config).norm_offset
    # Norms are written with the offset; rounded now as that rounds them, they come back as they are.
    tensors = {k: t + offset - offset if k.split(".")[-2].endswith("norm") else t for k, t in stock.tensors.items()}
    stock = replace(stock, tensors=parted(tensors))
    check_disk_space(path, int(1.1 * sum(4 * t.numel() for t in stock.tensors.values())))
    with new_file(path) as partial:
        writer = gguf.GGUFWriter(partial, architecture)
        for name, value in (_facts(config, stock, receipt or {}, kind) | vocabulary).items():
            getattr(writer, f"add_{name}")(value)
        kept = _write_tensors(writer, config, stock, kind)
        said, tensors = read_file(partial, names_of(config, stock), offset=offset)
        check_tensors(tensors, stock.tensors, kind)
        # A GGUF file knows no sliding window, and is for texts inside one; the check is not.
        said |= {"max_position_embeddings": config.max_position_embeddings}
        said = {key: value for key, value in said.items() if key != "rope_parameters" or not known.windows}
        found = probe(built(plain_config(config, said), joined(tensors)))
        if kind == "f32":
            check_same(found, expected, "What was written")
        nats = check_in_llama_cpp(partial, model, kind, longest=_longest(config), mixture=bool(stock.mixtures))
    return Exported(
        path=path,
        architecture=architecture,
        head_width=stock.head_width,
        mlp_widths=stock.mlp_widths,
        dtype=kind,
        difference=apart,
        rounding=None if kind == "f32" else difference(found, expected),
        llama_cpp=nats,
        notes=(*_notes(config, stock, kept), *notes),
    )


def _file(out: Path, kind: str) -> Path:
    path = out if out.suffix == ".gguf" else out / f"model-{kind}.gguf"
    if path.exists():
        raise TrisectError(f"The output {path} exists; name another with -o, or remove it.")
    check_writable(path)
    return path


def _architecture(config: Any, stock: Stock) -> str:
    """llama.cpp's name for what is to be computed, or the reason why it has none."""
    known = _known(config)
    activation = getattr(config, "hidden_act", None) or config.hidden_activation
    if activation != known.activation:
        raise TrisectError(f"llama.cpp computes {activation!r} MLPs as {known.activation}; use --to hf.")
    if known.halved and rotation_factors(config, stock) is not None:
        raise TrisectError(
            f"llama.cpp takes no list of frequencies for {known.name}, and this model's are scaled; use --to hf."
        )
    if known.square and stock.head_width * config.num_attention_heads != config.hidden_size:
        raise TrisectError(
            f"llama.cpp's {known.name} has heads that are together as wide as the residual stream; use --to hf."
        )
    if known.normalised is not None:
        _check_mixture(config, stock, known)
    if known.windows:
        _check_windows(config)
    return "deci" if needs_deci(config, stock) else known.name


def _known(config: Any) -> Architecture:
    family = family_for(config).name
    if family not in ARCHITECTURES:
        raise TrisectError(
            f"trisect writes no GGUF files of {family} models, only of {', '.join(ARCHITECTURES)}; use --to hf."
        )
    return ARCHITECTURES[family]


def _check_windows(config: Any) -> None:
    """Refuse what llama.cpp's Gemma 3 does not read from the file but takes for granted."""
    whole = [(number + 1) % PATTERN == 0 for number in range(len(config.layer_types))]
    pattern = [kind == "full_attention" for kind in config.layer_types] == whole
    plain = all(rope.get("rope_type") == "default" for rope in config.rope_parameters.values())
    local = config.rope_parameters["sliding_attention"]["rope_theta"] == LOCAL_BASE
    if not (pattern and plain and local and config.query_pre_attn_scalar == config.head_dim):
        raise TrisectError(
            "llama.cpp's gemma3 has every sixth layer looking at everything, local rotations to the base 10000, none "
            "of them scaled, and scores over the root of the head width; this model differs. Use --to hf."
        )


def _check_mixture(config: Any, stock: Stock, found: Architecture) -> None:
    """Refuse experts that llama.cpp routes otherwise, or does not have in some layers."""
    dense = set(range(config.num_hidden_layers)) - stock.mixtures
    if dense:
        raise TrisectError(
            f"llama.cpp's {found.name} has experts in every layer, and layer {min(dense)} of this model has one "
            "MLP; use --to hf."
        )
    if getattr(config, "norm_topk_prob", found.normalised) != found.normalised:
        raise TrisectError(
            f"llama.cpp's {found.name} {'makes' if found.normalised else 'does not make'} the weights of a token's "
            f"experts add up to one, and norm_topk_prob is {config.norm_topk_prob} here; use --to hf."
        )


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
        **{name: getattr(config, setting) for name, setting in _known(config).numbers},
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
    found = {WIDTHS[name]: width for name, width in widths.items()}
    if stock.mixtures:
        found |= {"expert_count": stock.experts, "expert_used_count": config.num_experts_per_tok}
    return found


def _longest(config: Any) -> int:
    """Tokens of a text that llama.cpp computes as the model does."""
    return min(int(config.max_position_embeddings), _window(config) or 1 << 31)


def _window(config: Any) -> int | None:
    """Tokens that attention looks back over, where not all layers look at everything."""
    types = getattr(config, "layer_types", None)
    if _known(config).windows or (types is not None and "sliding_attention" not in types):
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def _notes(config: Any, stock: Stock, kept: int) -> tuple[str, ...]:
    notes = []
    window = _window(config)
    if window is not None and window < config.max_position_embeddings:
        notes.append(f"llama.cpp ignores the sliding window, so the file allows texts of {window} tokens only")
    if kept:
        notes.append(f"{kept} matrices stay f16: their rows are no multiple of {BLOCK}, as q8_0 needs")
    if stock.head_width % BLOCK:
        notes.append(f"head width {stock.head_width} is no multiple of {BLOCK}: the KV cache cannot be quantised")
    if not needs_deci(config, stock):
        notes += padding_notes(stock)
    if rotation_factors(config, stock) is not None:
        notes.append("transformers ignores rope_freqs when it loads GGUF; for transformers, export --to hf")
    return tuple(notes)


def names_of(config: Any, stock: Stock) -> dict[str, str]:
    """Name in the checkpoint -> llama.cpp's name, in the order in which tensors are written."""
    # Llama's names are those of these two, which have every tensor that it has or could have.
    own = next(arch for arch, title in gguf.MODEL_ARCH_NAMES.items() if title == _known(config).name)
    both, layers = (gguf.MODEL_ARCH.QWEN3, gguf.MODEL_ARCH.QWEN2MOE), config.num_hidden_layers
    kinds = both if own == gguf.MODEL_ARCH.LLAMA or stock.mixtures else (own, own)
    tables = [gguf.get_tensor_name_map(architecture, layers) for architecture in kinds]
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    names = {}
    for name in stock.tensors:
        found = [table.get_name(name, try_suffixes=(".weight", ".bias")) for table in tables]
        if name not in tied:
            names[name] = str(found[0] or found[1])
    return names


def _write_tensors(writer: Any, config: Any, stock: Stock, kind: str) -> int:
    """Write all weights, none made before its turn; how many stay f16 where q8_0 was asked for."""
    factors = rotation_factors(config, stock)
    kinds = {} if factors is None else {FACTORS: "f32"}
    ours = {theirs: name for name, theirs in names_of(config, stock).items()}

    def native(theirs: str) -> Tensor:
        if theirs == FACTORS:
            return Tensor(factors)
        return _native(ours[theirs], stock.tensors[ours[theirs]], config, stock)

    for theirs in ours:
        shape = tuple(native(theirs).shape)
        fits = kind != "q8_0" or shape[-1] % BLOCK == 0
        kinds[theirs] = "f32" if len(shape) == 1 or ROUTER in theirs else kind if fits else "f16"
    for theirs, chosen in kinds.items():  # all are listed before the first is written
        shape, dtype = tuple(native(theirs).shape), np.dtype(KINDS[chosen].dtype)
        if chosen == "q8_0":
            shape = gguf.quant_shape_to_byte_shape(shape, KINDS[chosen].ggml)
        size = int(np.prod(shape)) * dtype.itemsize
        writer.add_tensor_info(theirs, shape, dtype, size, raw_dtype=KINDS[chosen].ggml)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for theirs, chosen in kinds.items():
        array = native(theirs).contiguous().float().cpu().numpy()
        writer.write_tensor_data(gguf.quants.quantize(array, KINDS[chosen].ggml))
    writer.close()
    return list(kinds.values()).count("f16") if kind == "q8_0" else 0


def rotation_factors(config: Any, stock: Stock) -> list[float] | None:
    """Divisors of llama.cpp's own frequencies, None where those are the model's."""
    if stock.rates is None:
        return None
    factors = stock_factors(stock.rates, _base(config))
    return None if max(abs(factor - 1) for factor in factors) <= SAME else factors


def needs_deci(config: Any, stock: Stock) -> bool:
    """llama.cpp reads MLP widths per layer for this architecture; its biases are sized for whole heads."""
    special = any(name.endswith(".bias") or "_norm." in name for name in stock.tensors)
    special = special or _known(config).name != "llama"
    return len(set(stock.mlp_widths)) > 1 and not special and not stock.mixtures


def _native(name: str, tensor: Tensor, config: Any, stock: Stock) -> Tensor:
    """A tensor in llama.cpp's order of channels, and no wider than its layer needs."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    kind = name.split(".")[-2]
    if kind.endswith("norm"):
        return tensor + family_for(config).norm_offset
    if kind in heads and not _known(config).halved:
        return interleaved(tensor, heads[kind])
    if ".mlp." in name and needs_deci(config, stock):
        width = stock.mlp_widths[int(name.split(".")[2])]
        return tensor[:, :width] if ".down_proj." in name else tensor[:width]
    return tensor


GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"


def parted(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gate and up of all experts of a layer (E, 2 I, D) as tensors of their own; what has no experts as it is."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(GATE_UP):
            prefix, halves = name.removesuffix(GATE_UP), tensor.chunk(2, dim=1)
            found |= {
                f"{prefix}experts.{which}_proj.weight": x for which, x in zip(("gate", "up"), halves, strict=True)
            }
        else:
            found[f"{name}.weight" if name.endswith(DOWN) else name] = tensor
    return found


def joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo `parted`."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_proj.weight"):
            up = tensors[name.replace("gate_proj.weight", "up_proj.weight")]
            found[name.replace("gate_proj.weight", "gate_up_proj")] = torch.cat([tensor, up], dim=1)
        elif not name.endswith("experts.up_proj.weight"):
            found[name.removesuffix(".weight") if name.endswith(f"{DOWN}.weight") else name] = tensor
    return found


def interleaved(x: Tensor, heads: int) -> Tensor:
    """Rows (heads 2n, ...): from [firsts | seconds] of each head to adjacent pairs, as llama.cpp has them."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def halved(x: Tensor, heads: int) -> Tensor:
    """Undo `interleaved`."""
    return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def read_file(path: Path, names: dict[str, str], *, offset: float = 0.0) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the file says, in a config's words, and its tensors in float32, MLPs padded to one width.

    `names` are those of a checkpoint, with llama.cpp's; the checkpoint's norms hold their weights less `offset`.
    """
    reader = gguf.GGUFReader(path)
    said = _said(reader)
    found = {
        tensor.name: torch.from_numpy(
            np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        )
        for tensor in reader.tensors
    }
    base = said["rope_parameters"]["rope_theta"]
    if FACTORS in found:
        factors = found.pop(FACTORS).tolist()
        said["rope_parameters"] = listed_rope(factors, base, said["max_position_embeddings"])
    said["tie_word_embeddings"] = "output.weight" not in found
    heads = {"attn_q": said["num_attention_heads"], "attn_k": said["num_key_value_heads"]}
    architecture = reader.fields["general.architecture"].contents()
    if any(each.halved for each in ARCHITECTURES.values() if each.name == architecture):
        heads = {}
    ours = {theirs: name for name, theirs in names.items()}
    tensors = {}
    for name, tensor in found.items():
        kind, more = name.split(".")[-2], said["intermediate_size"]
        if kind.endswith("norm"):
            tensor = tensor - offset
        elif kind in heads:
            tensor = halved(tensor, heads[kind])
        elif kind in ("ffn_up", "ffn_gate"):
            tensor = pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, more - tensor.shape[0]))
        elif kind == "ffn_down" and tensor.ndim > 1:
            tensor = pad(tensor, (0, more - tensor.shape[1]))
        tensors[ours.get(name, name)] = tensor
    if said["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return said, tensors


def _said(reader: Any) -> dict[str, Any]:
    arch = reader.fields["general.architecture"].contents()

    def value(key: str) -> Any:
        """One number; the largest of a list with one for every layer."""
        found = reader.fields[f"{arch}.{key}"].contents()
        return max(found) if isinstance(found, list) else found

    return {
        "vocab_size": value("vocab_size"),
        "max_position_embeddings": value("context_length"),
        "hidden_size": value("embedding_length"),
        "num_hidden_layers": value("block_count"),
        **{ours: value(theirs) for ours, theirs in WIDTHS.items() if f"{arch}.{theirs}" in reader.fields},
        "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value("attention.key_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": value("rope.freq_base")},
    }


def check_tensors(found: dict[str, Tensor], expected: dict[str, Tensor], kind: str) -> None:
    """Refuse a file whose weights are not the ones that were to be written."""
    if set(found) != set(expected):
        odd = sorted(set(found) ^ set(expected))
        raise TrisectError(f"The GGUF file misses or invents {odd[0]}; nothing was written. Please report it.")
    for name, tensor in expected.items():
        error = float((found[name] - tensor).norm() / tensor.norm().clamp(min=1e-30))
        if not error <= KINDS[kind].loss:
            raise TrisectError(
                f"{name} came back from the GGUF file with an error of {error:.2g}, where {kind} explains "
                f"{KINDS[kind].loss:g}; nothing was written. Try --dtype f32, and please report it."
            )
