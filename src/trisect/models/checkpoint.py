"""Load and save: hub ids, folders, GGUF files, registry names in; a plain Hugging Face folder out."""

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from trisect.bundle import write_bundle, write_card
from trisect.data import catalogue, read
from trisect.errors import TrisectError, check_names
from trisect.models import compressed, generic, layer_views, left_whole, limits, linear, looking, shape_of, streamed
from trisect.models.families import BUILT_IN, FAMILIES, PREFIX, WRAPPERS, family_for
from trisect.models.source import Source, Weights, check_weights, read_raw_config, reading_once, resolve
from trisect.records.shapes import ModelShape
from trisect.support import checks, files
from trisect.support.receipt import package_version

log = logging.getLogger(__name__)

SWITCH = "TRISECT_GGUF_CACHE"  # an environment variable: 0 keeps nothing and reads nothing that was kept
CONVERTERS = ("transformers", "tokenizers", "gguf", "torch")  # what the result depends on besides the file


def reset_invalid_generation_config(model: Any) -> None:
    """Put defaults in place of contradictory settings: transformers loads those, but refuses to save them."""
    try:
        model.generation_config.validate(strict=True)
    except Exception as error:  # values of any type may be there, and their checks raise what they run into
        reason = " ".join(str(error).split())[:200]
        log.warning("generation_config.json was left out, because it cannot be saved again: %s", reason)
        model.generation_config = transformers.GenerationConfig.from_model_config(model.config)


@contextmanager
def from_hub(source: Source) -> Iterator[None]:
    """Around whatever loads a model: errors of the hub's libraries become one line, and come soon."""
    if source.local:
        yield
        return
    try:
        with read.short_patience():
            yield
    except TrisectError as error:
        advice = _advice(source.path, error)
        if advice is None:
            raise
        raise TrisectError(f"{advice}; a folder or a .gguf file works too.") from error


def _advice(name: str, error: BaseException | None) -> str | None:
    """By what lies behind an error; None where that has nothing to do with the hub."""
    behind: set[str] = set()
    while error is not None:
        behind |= {kind.__name__ for kind in type(error).__mro__}
        error = error.__cause__ or error.__context__
    if "GatedRepoError" in behind:
        return f"{name} is gated: ask for access on its page of the hub, then type `hf auth login`"
    if "RepositoryNotFoundError" in behind:
        return f"The hub has no model {name}, or it is private: check the id, or `hf auth login`"
    if not read.hub_answers():
        return f"The Hugging Face hub cannot be reached, and its cache has not all of {name}"
    if "TransportError" in behind:
        return f"The download of {name} broke off: type the same again, and it goes on from there"
    return None


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What weights can be loaded as, by the names that users type."""
WORKING = "working"  # a dtype: the checkpoint's own, but float32 for 16 bits on a CPU, five times faster there


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model, and what came with it."""

    model: Any
    tokenizer: Any  # None where the checkpoint carries none
    name: str
    num_bytes: int | None = None  # of the weight files; None where nobody knows


def load_model(
    name: str,
    *,
    dtype: str | torch.dtype | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
    stream: str = "off",
) -> Loaded:
    """Load a model and its tokenizer; the dtype is the checkpoint's own unless one is given.

    Whatever it computes in, the model is saved in the checkpoint's own dtype (`model.stored_dtype`).
    A streamed model ("on", or "auto" where memory is short) reads its layers one at a time.
    """
    checks.check_device(device)
    name = fetched(name)
    kept = kept_folder(name) if stream != "on" and _dtype(dtype, torch.float32, device) == torch.float32 else None
    converted = kept is not None and kept.is_dir()
    source = resolve(str(kept) if converted else name, trusted=trust_remote_code)
    with from_hub(source), reading_once(source.gguf):
        weights = check_weights(source)
        model = _load(source, name, weights, dtype, device=device, stream="off" if converted else stream)
        tokenizer = _tokenizer(source)
    num_bytes = None if weights is None else weights.size
    if kept is not None:
        num_bytes = Path(name).stat().st_size
        if converted:  # as if it had been read from the file
            model.config._name_or_path = model.name_or_path = tokenizer.name_or_path = str(Path(name).parent)
        else:
            keep(kept, model, tokenizer)
    return Loaded(model=model, tokenizer=starting_texts(tokenizer, model), name=name, num_bytes=num_bytes)


def _load(
    source: Source, name: str, weights: Weights | None, dtype: str | torch.dtype | None, *, device: str, stream: str
) -> Any:
    config = read_config(source)
    if weights is not None:  # before memory is taken for what the files do not hold
        where, packed = f"The config of {name}", getattr(config, "quantization_config", None) is not None
        limits.check_layers(config, len(weights.shapes), where=where)
        limits.check_fits(_blank(config, name), weights.shapes, size=weights.size, packed=packed, where=where)
    model_class, own = _class_for(config), _own_dtype(config, source, weights)
    kind = _dtype(dtype, own, device)
    size = 0 if weights is None else weights.size * kind.itemsize / own.itemsize
    if streamed.to_be_streamed(stream, source, device=device, size=size):
        with checks.explained(f"Cannot load {name}"):
            model = streamed.load_layers_later(model_class, config, source.path, dtype=kind, device=device)
    else:
        extra: Any = {} if source.gguf else {"config": config, "use_safetensors": True}
        extra |= {**source.kwargs, "dtype": kind, "output_loading_info": True}
        with checks.explained(f"Cannot load {name}"):
            model, info = model_class.from_pretrained(source.path, **extra)
        _check_loaded(name, info)
        if getattr(model.config, "quantization_config", None) is not None:
            # A GGUF model arrives dequantised but still says it is quantised, and then refuses to be saved.
            del model.config.quantization_config
            model.hf_quantizer, model.is_quantized = None, False
        model.to(device).eval()
        looking.warn_of_slow_widths(model)
    reset_invalid_generation_config(model)
    model.stored_dtype = own
    return model


def kept_folder(name: str) -> Path | None:
    """Where what is made of a GGUF file is kept, under its content; None for anything else, or if switched off."""
    file = Path(name)
    if os.environ.get(SWITCH) == "0" or file.suffix != ".gguf" or not file.is_file():
        return None
    try:
        content = catalogue.file_hash(file)
    except OSError:
        return None  # whoever reads the file says why
    made_by = [content, *(f"{package} {package_version(package)}" for package in CONVERTERS)]
    return catalogue.cache_folder() / "gguf" / hashlib.sha256("\n".join(made_by).encode()).hexdigest()


def keep(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a model and its tokenizer, whole or not at all; a cache without room is no reason to stop."""
    try:
        files.check_disk_space(folder, sum(parameter.nbytes for parameter in model.parameters()))
        with files.new_folder(folder) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    except (OSError, TrisectError) as error:
        if not folder.exists():  # or else another process has kept it meanwhile
            log.warning("the converted model is not kept for next time: %s", error)


def fetched(name: str) -> str:
    """The file of a built-in model, downloaded where it is not yet here; any other name as it is."""
    return str(catalogue.fetch_model(name)) if name in catalogue.REGISTRY_MODELS else name


def read_config(source: Source) -> Any:
    """The config of a known family, or an error that says what is missing."""
    where = f"The config of {source.path}"
    if not source.gguf:
        with checks.explained(f"Cannot read the config of {source.path}"):
            hub = transformers.PreTrainedConfig.get_config_dict
            raw = read_raw_config(source) if source.local else hub(source.path)[0]
        limits.check_config(raw, where=where)
        if packed := raw.get("quantization_config"):
            method = packed.get("quant_method") if isinstance(packed, dict) else packed
            instead = "use the original weights, quantise what trisect saves (docs/quantize.md)"
            raise TrisectError(f"{source.path} is quantised ({str(method)[:40]}): {instead}.")
        named = str(raw.get("model_type")).removeprefix(PREFIX)
        if named in (*FAMILIES, *WRAPPERS):
            compressed.register_families(named)
        # A list, because the name may be anything, hashable or not.
        known = raw.get("model_type") in list(transformers.CONFIG_MAPPING)
        if "auto_map" in raw and not known and not source.trusted:
            own = f"{source.path} brings its own code (auto_map in config.json)"
            raise TrisectError(f"{own}; it is run only when asked: --trust-remote-code, if you trust its authors.")
        generic.recognise(raw)
    with checks.explained(f"Cannot read the config of {source.path}"):
        config = transformers.AutoConfig.from_pretrained(source.path, **source.kwargs)
    generic.recognise(config.to_dict())
    limits.check_config(config.to_dict(), where=where)
    limits.check_attention(config, family_for(config), where=where)
    if hasattr(config, "trisect") != config.model_type.startswith(PREFIX):
        raise TrisectError(f"{where}: model_type {PREFIX}... and a `trisect` entry go together; one is there.")
    if hasattr(config, "trisect"):
        limits.check_entry(config.trisect)
    return config


def read_shape(
    name: str, *, trust_remote_code: bool = False, drop_layers: int = 0
) -> tuple[ModelShape, ModelShape, dict[str, Any]]:
    """Current and original shape and a few facts, from the config alone: no weights are read.

    With `drop_layers`, current is what is left without so many of them.
    """
    model = look_at(name, trust_remote_code=trust_remote_code, tokenizer=False).model
    config = model.config
    model.to(config.dtype or torch.float32)
    entry = getattr(config, "trisect", None) or {}
    info = {
        "family": family_for(config).name,
        "method": entry.get("method"),
        "asked_ratio": entry.get("ratio"),
        "quantization": linear.packing_summary(entry.get("quantization")),
        "dropped_layers": compressed.dropped_layers(model),
        "left_whole": left_whole(layer_views(model)),
        "context": getattr(config.get_text_config(), "max_position_embeddings", None),
    }
    current = looking.shape_without(model, drop_layers) if drop_layers else shape_of(model)
    return current, original_shape(model), info


def look_at(name: str, *, trust_remote_code: bool = False, tokenizer: bool = True) -> Loaded:
    """A model without its weights, and its tokenizer: its sizes, and for engines that load the weights themselves."""
    name = fetched(name)
    source = resolve(name, trusted=trust_remote_code)
    with from_hub(source):
        model = _blank(read_config(source), name)
        texts = starting_texts(_tokenizer(source), model) if tokenizer else None
    return Loaded(model=model, tokenizer=texts, name=name)


def original_shape(model: Any) -> ModelShape:
    """The shape before any compression."""
    now = shape_of(model)
    undone: Any = {"dropped_experts": 0, "shared_output": False, "linears": ()}
    layers = tuple(
        replace(layer, **vars(widths), experts=layer.experts + layer.dropped_experts, **undone)
        for layer, widths in zip(now.layers, compressed.original_widths(model), strict=True)
    )
    depth = len(layers) + len(compressed.dropped_layers(model))
    return replace(now, layers=layers).with_depth(depth, apart=looking.parameters_apart(layer_views(model)[0]))


def save_model(
    model: Any, tokenizer: Any, out: str | Path, *, receipt: dict[str, Any], layers: Sequence[Path] | None = None
) -> Path:
    """Write a Hugging Face folder: weights, config with the plan, tokenizer, receipt, modelling file, card.

    A streamed model's `layers` are in files, one each, which become its shards.
    """
    with as_stored(model), files.new_folder(out) as folder:
        # Quantised weights are buffers.
        size = sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))
        files.check_disk_space(out, int(size * 1.05))
        whole = model
        if layers is None:
            model.save_pretrained(folder)
        else:
            streamed.write_shards(model, layers, folder)
            whole = load_model(str(folder), device=str(model.device), stream="on").model  # in the files' own dtype
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        files.write_json(folder / "receipt.json", receipt)
        if not isinstance(model, compressed.CompressedModel):  # a dense model that was tuned
            return Path(out)
        files.write_json(folder / looking.PROBE, looking.probe_of(whole))
        # What people without trisect need: a modelling file that transformers can run, and a card to read.
        family = family_for(model.config)
        record = None if family.name in (*BUILT_IN, *WRAPPERS) else repr(family)
        write_bundle(folder, model, family=family.name, record=record)
        shapes, whole = (original_shape(model), shape_of(model)), family.name not in WRAPPERS
        write_card(folder, model, receipt, shapes=shapes, family=family.name if whole else None)
        streamed.check_saved(model, folder)
    return Path(out)


@contextmanager
def as_stored(model: Any) -> Iterator[None]:
    """Weights in the dtype that they came in, while they are saved; `round_as_stored` makes this lose nothing."""
    now = next(model.parameters()).dtype
    _cast(model, getattr(model, "stored_dtype", None) or now)
    try:
        yield
    finally:
        _cast(model, now)


def _cast(model: Any, dtype: torch.dtype) -> None:
    """Parameters alone: tables of angles stay exact."""
    if model.dtype != dtype:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def starting_texts(tokenizer: Any, model: Any) -> Any:
    """The tokenizer, beginning every text with BOS where the model needs that: those of GGUF files do not."""
    # `starts_with_bos` tells whoever cuts windows out of a text (trisect/data/load.py).
    if getattr(tokenizer, "bos_token_id", None) is not None and family_for(model.config).starts_with_bos:
        tokenizer.add_bos_token = tokenizer.starts_with_bos = True
    return tokenizer


def _class_for(config: Any) -> Any:
    family = family_for(config)
    if config.model_type.startswith(PREFIX):
        return compressed.compressed_class(family.name)
    return getattr(transformers, family.model)


def _blank(config: Any, name: str) -> Any:
    """The model without memory for its weights."""
    with torch.device("meta"), checks.explained(f"Cannot build a model from the config of {name}"):
        return _class_for(config)(config)


def _own_dtype(config: Any, source: Source, weights: Weights | None) -> torch.dtype:
    """What a checkpoint's weights are in; those of a GGUF file, of a few bits each, become float32."""
    stored = None if source.gguf else config.dtype or (weights and weights.dtype)
    return getattr(torch, stored) if isinstance(stored, str) else stored or torch.float32


def _dtype(dtype: str | torch.dtype | None, own: torch.dtype, device: str) -> torch.dtype:
    if dtype == WORKING and torch.device(device).type == "cpu" and own.itemsize < 4:
        return torch.float32
    if dtype in (None, WORKING):
        return own
    if isinstance(dtype, torch.dtype):
        return dtype
    check_names("dtype", [str(dtype)], DTYPES)
    return DTYPES[str(dtype)]


def _check_loaded(name: str, info: dict[str, Any]) -> None:
    """transformers fills missing weights with random numbers and goes on; nobody wants that compressed."""
    missing, mismatched = sorted(info["missing_keys"]), sorted(info["mismatched_keys"])
    if missing:
        raise TrisectError(f"{name} is incomplete: it has no weights for {missing[0]} ({len(missing)} missing).")
    if mismatched:
        key, stored, wanted = mismatched[0]
        sizes = f"file {tuple(stored)}, config {tuple(wanted)}; {len(mismatched)} in all"
        raise TrisectError(f"{name}: config.json does not fit the weights: {key} ({sizes}).")


def _tokenizer(source: Source) -> Any:
    if not source.has_tokenizer:
        return None
    with checks.explained(f"Cannot load the tokenizer of {source.path}"):
        return transformers.AutoTokenizer.from_pretrained(source.path, **source.kwargs)
