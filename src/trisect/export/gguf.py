"""A GGUF file for llama.cpp, written tensor by tensor and read back before it gets its name."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from trisect.errors import TrisectError, unknown_name
from trisect.export.check import check_in_llama_cpp, check_same, difference, probe
from trisect.export.digits import split_digits
from trisect.export.gguf_read import check_tensors, read_file
from trisect.export.gguf_tensors import (
    BLOCK,
    KINDS,
    file_tensors,
    needs_deci,
    rotation_factors,
    write_tensors,
)
from trisect.export.hf import built, stock_config
from trisect.export.stock import Stock, stock_weights
from trisect.export.targets import GGUF, check_exportable, plain_config
from trisect.export.vocabulary import Vocabulary, vocabulary_of
from trisect.files import check_disk_space, check_writable, new_file
from trisect.models import family_for

FILE_TYPES = {
    "f32": gguf.LlamaFileType.ALL_F32,
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}


@dataclass(frozen=True, kw_only=True)
class ExportedFile:
    """What was written, and how near it is to the native model."""

    path: Path
    architecture: str
    head_width: int
    mlp_widths: tuple[int, ...]
    kind: str
    difference: float
    """Of float32 logits, relative to the largest one."""
    rounding: float | None
    """The same of the numbers in the file; None for f32."""
    llama_cpp: float | None
    """Nats between the native model's next token and llama.cpp's; None where that is not installed."""
    notes: tuple[str, ...] = ()


def export_gguf(
    model: Any, tokenizer: Any, out: str | Path, *, kind: str = "f16", receipt: dict[str, Any] | None = None
) -> ExportedFile:
    """Write a model, given in float32, as one GGUF file for llama.cpp."""
    if kind not in KINDS:
        raise unknown_name("kind of GGUF weights", kind, KINDS, "float32 and the like are for --to hf.")
    path = _file(Path(out), kind)
    check_exportable(model)
    config = model.config
    tokenizer, notes = split_digits(tokenizer)
    vocabulary = vocabulary_of(tokenizer, config.vocab_size)
    stock = stock_weights(model, baked=True)
    architecture = _architecture(config, stock)
    expected = probe(model)
    apart = check_same(probe(built(stock_config(config, stock), stock.tensors)), expected, "The stock model")
    check_disk_space(path, int(1.1 * sum(4 * t.numel() for t in stock.tensors.values())))
    with new_file(path) as partial:
        writer = gguf.GGUFWriter(partial, architecture)
        _add_facts(writer, config, stock, receipt or {}, kind)
        _add_vocabulary(writer, vocabulary)
        listed = file_tensors(config, stock, kind)
        kept = sum(tensor.kind == "f16" for tensor in listed) if kind == "q8_0" else 0
        write_tensors(writer, listed)
        said, tensors = read_file(partial)
        check_tensors(tensors, stock.tensors, kind)
        # A GGUF file knows no sliding window, and is for texts inside one; the check is not.
        said |= {"max_position_embeddings": config.max_position_embeddings}
        found = probe(built(plain_config(config, said), tensors))
        if kind == "f32":
            check_same(found, expected, "What was written")
        apart_there = check_in_llama_cpp(partial, model, kind, longest=_longest(config))
    return ExportedFile(
        path=path,
        architecture=architecture,
        head_width=stock.head_width,
        mlp_widths=stock.mlp_widths,
        kind=kind,
        difference=apart,
        rounding=None if kind == "f32" else difference(found, expected),
        llama_cpp=apart_there,
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
    family = family_for(config).name
    if family not in GGUF:
        raise TrisectError(
            f"trisect writes no GGUF files of {family} models, only of {', '.join(GGUF)}; use --to hf."
        )
    if config.hidden_act != "silu":
        raise TrisectError(f"llama.cpp computes {config.hidden_act!r} MLPs as silu; use --to hf.")
    if family == "qwen3":
        if rotation_factors(config, stock) is not None:
            raise TrisectError(
                "llama.cpp takes no list of frequencies for qwen3, and this model's are scaled; use --to hf."
            )
        return "qwen3"
    return "deci" if needs_deci(stock) else "llama"


def _add_facts(writer: Any, config: Any, stock: Stock, receipt: dict[str, Any], kind: str) -> None:
    """The architecture in numbers."""
    writer.add_name(f"{config.model_type.removeprefix('trisect_')} compressed with trisect")
    recipe = receipt.get("recipe") or {}
    if recipe.get("method"):
        writer.add_description(f"trisect, method {recipe['method']}, ratio {recipe.get('ratio')}")
    per_layer = needs_deci(stock)
    layers = config.num_hidden_layers
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(_longest(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(list(stock.mlp_widths) if per_layer else stock.mlp_width)
    writer.add_head_count([heads] * layers if per_layer else heads)
    writer.add_head_count_kv([kv_heads] * layers if per_layer else kv_heads)
    writer.add_key_length(stock.head_width)
    writer.add_value_length(stock.head_width)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(stock.head_width)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))


def _add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores is not None:
        writer.add_token_scores(vocabulary.scores)
    if vocabulary.merges is not None:
        writer.add_token_merges(vocabulary.merges)
    for name, token in vocabulary.special.items():
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_eos_token(vocabulary.add_eos)
    if vocabulary.model == "llama":
        writer.add_add_space_prefix(vocabulary.add_space)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


def _longest(config: Any) -> int:
    """Tokens of a text that llama.cpp computes as the model does."""
    return min(int(config.max_position_embeddings), _window(config) or 1 << 31)


def _window(config: Any) -> int | None:
    """Tokens that attention looks back over, where not all layers look at everything."""
    types = getattr(config, "layer_types", None)
    if types is not None and "sliding_attention" not in types:
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def _notes(config: Any, stock: Stock, kept: int) -> tuple[str, ...]:
    notes = []
    window = _window(config)
    if window is not None and window < config.max_position_embeddings:
        notes.append(
            f"llama.cpp ignores the sliding window, so the file allows texts of {window} tokens only"
        )
    if kept:
        notes.append(f"{kept} matrices stay f16: their rows are no multiple of {BLOCK}, as q8_0 needs")
    if stock.head_width % BLOCK:
        notes.append(
            f"head width {stock.head_width} is no multiple of {BLOCK}: the KV cache cannot be quantised"
        )
    if rotation_factors(config, stock) is not None:
        notes.append("transformers ignores rope_freqs when it loads GGUF; for transformers, export --to hf")
    return tuple(notes)
