"""A GGUF file for llama.cpp, written tensor by tensor and read back before it gets its name."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from trisect.errors import TrisectError, unknown_name
from trisect.export.architectures import ARCHITECTURES, WIDTHS, Architecture, check_computed, known_architecture
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
    path = Path(out) if Path(out).suffix == ".gguf" else Path(out) / f"model-{kind}.gguf"
    if path.exists():
        raise TrisectError(f"The output {path} exists; name another with -o, or remove it.")
    check_writable(path)
    check_exportable(model)
    config = model.config
    tokenizer, notes = split_digits(tokenizer)
    vocabulary = vocabulary_of(tokenizer, config.vocab_size)
    known = known_architecture(config)
    stock = stock_weights(model, baked=not known.pattern)
    check_computed(config, stock, listed=rotation_factors(config, stock) is not None)
    architecture = "deci" if needs_deci(config, stock) else known.name
    expected = probe(model)
    apart = check_stock(stock_config(config, stock), stock, expected)
    offset = family_for(config).norm_offset
    # Norms are written with the offset; rounded now as that rounds them, they come back as they are.
    tensors = {k: t + offset - offset if k.split(".")[-2].endswith("norm") else t for k, t in stock.tensors.items()}
    stock = replace(stock, tensors=parted(tensors, interleaved=_interleaved(config)))
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
        said = {key: value for key, value in said.items() if key != "rope_parameters" or not known.pattern}
        found = probe(built(plain_config(config, said), joined(tensors, interleaved=_interleaved(config))))
        if kind == "f32":
            check_same(found, expected, "What was written")
        with _turning_as_llama_cpp(model):
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


@contextmanager
def _turning_as_llama_cpp(model: Any) -> Iterator[None]:
    """With YaRN's range in whole channels, as llama.cpp has it; a note says so where the model has it otherwise."""
    if not _rounds_range(model.config):
        yield
        return
    config, table = deepcopy(model.config), model.model.rotary_emb
    config.rope_parameters = {**config.rope_parameters, "truncate": True}
    try:
        model.model.rotary_emb = type(table)(config).to(next(model.parameters()).device)
        yield
    finally:
        model.model.rotary_emb = table


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
        **({} if needs_deci(config, stock) else dict.fromkeys(padding_notes(stock), True)),
        "transformers ignores rope_freqs when it loads GGUF; for transformers, export --to hf": (
            rotation_factors(config, stock) is not None
        ),
    }
    return tuple(note for note, true in notes.items() if true)


def names_of(config: Any, stock: Stock) -> dict[str, str]:
    """Name in the checkpoint -> llama.cpp's name, in the order in which tensors are written."""
    # Llama's names are those of these two, which have every tensor that it has or could have.
    own = next(arch for arch, title in gguf.MODEL_ARCH_NAMES.items() if title == known_architecture(config).name)
    both = own == gguf.MODEL_ARCH.LLAMA or (stock.mixtures and not known_architecture(config).numbers)
    kinds = (gguf.MODEL_ARCH.QWEN3, gguf.MODEL_ARCH.QWEN2MOE) if both else (own, own)
    tables = [gguf.get_tensor_name_map(kind, config.num_hidden_layers) for kind in kinds]
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    names = {}
    for name in (name for name in stock.tensors if name not in tied):
        usual = name.replace("block_sparse_moe", "mlp")
        found = [table.get_name(usual, try_suffixes=(".weight", ".bias")) for table in tables]
        theirs = str(found[0] or found[1])
        names[name] = theirs if theirs.endswith((".weight", ".bias")) else f"{theirs}.weight"
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
        exact = len(shape) == 1 or ROUTER in theirs or theirs.endswith(".bias")
        kinds[theirs] = "f32" if exact else kind if fits else "f16"
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


def _interleaved(config: Any) -> bool:
    """Whether experts are stored (in, out) with gate and up taking turns."""
    experts = family_for(config).experts
    return experts is not None and experts.interleaved


EXPERTS = {"_proj": ".weight", "_proj_bias": ".bias"}
"""Endings of experts' tensors in a checkpoint -> of llama.cpp's kind."""


def parted(tensors: dict[str, Tensor], *, interleaved: bool = False) -> dict[str, Tensor]:
    """Gate and up of all experts of a layer (E, 2 I, D) as tensors of their own; what has no experts as it is."""
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


def joined(tensors: dict[str, Tensor], *, interleaved: bool = False) -> dict[str, Tensor]:
    """Undo `parted`."""
    found: dict[str, Tensor] = {}
    for name, x in tensors.items():
        prefix, _, last = name.rpartition("experts.")
        ending = next((ours for ours, theirs in EXPERTS.items() if prefix and last.endswith(f"_proj{theirs}")), None)
        if ending is None or last.startswith("up_proj"):
            found |= {} if ending else {name: x}
            continue
        which = last.partition("_proj")[0]
        if which == "gate":
            both = (x, tensors[name.replace("experts.gate_proj", "experts.up_proj")])
            x, which = torch.stack(both, dim=2).flatten(1, 2) if interleaved else torch.cat(both, dim=1), "gate_up"
        found[f"{prefix}experts.{which}{ending}"] = x.mT.contiguous() if interleaved and x.ndim == 3 else x
    return found


def interleaved(x: Tensor, heads: int) -> Tensor:
    """Rows (heads 2n, ...): from [firsts | seconds] of each head to adjacent pairs, as llama.cpp has them."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def halved(x: Tensor, heads: int) -> Tensor:
    """Undo `interleaved`."""
    return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def read_file(path: Path, names: dict[str, str], *, offset: float = 0.0) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the file says, in a config's words, and its tensors in float32, MLPs padded to one width."""
    # `names` are those of a checkpoint, with llama.cpp's; the checkpoint's norms hold their weights less `offset`.
    reader = gguf.GGUFReader(path)
    said = _said(reader)
    arrays = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    found = {name: torch.from_numpy(np.array(array, dtype=np.float32)) for name, array in arrays.items()}
    base = said["rope_parameters"]["rope_theta"]
    if FACTORS in found:
        factors = found.pop(FACTORS).tolist()
        said["rope_parameters"] = listed_rope(factors, base, said["max_position_embeddings"])
    said["tie_word_embeddings"] = "output.weight" not in found
    heads = {"attn_q": said["num_attention_heads"], "attn_k": said["num_key_value_heads"]}
    if any(each.halved for each in _named_in(reader)):
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


def _named_in(reader: Any) -> list[Architecture]:
    """What llama.cpp computes under the name that a file has; nothing for deci."""
    name = reader.fields["general.architecture"].contents()
    return [each for each in ARCHITECTURES.values() if each.name == name]


def _said(reader: Any) -> dict[str, Any]:
    """What a file says, in a config's words."""
    arch = reader.fields["general.architecture"].contents()
    width = next((each.width for each in _named_in(reader)), None)
    widths = WIDTHS if width is None else {"intermediate_size": width}

    def value(key: str) -> Any:
        """One number; the largest of a list with one for every layer."""
        found = reader.fields[f"{arch}.{key}"].contents()
        return max(found) if isinstance(found, list) else found

    return {
        "vocab_size": value("vocab_size"),
        "max_position_embeddings": value("context_length"),
        "hidden_size": value("embedding_length"),
        "num_hidden_layers": value("block_count"),
        **{ours: value(theirs) for ours, theirs in widths.items() if f"{arch}.{theirs}" in reader.fields},
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
