"""Load and save: hub ids, folders, GGUF files, registry names in; a plain Hugging Face folder out."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from trisect.bundle import Sizes, write_bundle, write_card
from trisect.data.hub import hub_answers, short_patience
from trisect.data.registry import REGISTRY_MODELS, fetch_model
from trisect.errors import TrisectError
from trisect.models.compressed import CompressedModel, compressed_class, original_widths
from trisect.models.families import BUILT_IN, PREFIX, WRAPPERS, family_for
from trisect.models.limits import check_config, check_fits, check_heads, check_layers, check_position_scale
from trisect.models.paths import warn_of_slow_paths
from trisect.models.quantized import packing_summary
from trisect.models.shards import check_saved
from trisect.models.source import Source, Weights, check_weights, read_raw_config, resolve
from trisect.models.streamed import load_layers_later, to_be_streamed, write_shards
from trisect.models.view import shape_of
from trisect.records.shapes import ModelShape
from trisect.support.files import check_disk_space, new_folder, write_json


class explained:
    """Loading libraries raise many things for a damaged checkpoint; the user gets their first line."""

    def __init__(self, what: str):
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # A panic of the tokenizers library is no Exception, but no more than a damaged file either.
        expected = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if error is None or isinstance(error, TrisectError) or not expected:
            return
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise TrisectError(f"{self.what}: {lines[0][:400]}") from error


log = logging.getLogger(__name__)


def mend_generation(model: Any) -> None:
    """Put defaults in place of settings that contradict themselves.

    transformers loads those and refuses to save them, which would be after all the work.
    """
    try:
        model.generation_config.validate(strict=True)
    except Exception as error:  # values of any type may be there, and their checks raise what they run into
        reason = " ".join(str(error).split())[:200]
        log.warning("generation_config.json was left out, because it cannot be saved again: %s", reason)
        model.generation_config = transformers.GenerationConfig.from_model_config(model.config)


LOCAL = "a folder or a .gguf file works too"


@contextmanager
def from_hub(source: Source) -> Iterator[None]:
    """Around whatever loads a model: errors of the hub's libraries become one line, and come soon."""
    if source.local:
        yield
        return
    try:
        with short_patience():
            yield
    except TrisectError as error:
        advice = _advice(source.path, error)
        if advice is None:
            raise
        raise TrisectError(advice) from error


def _advice(name: str, error: BaseException) -> str | None:
    """By what lies behind an error; None where that has nothing to do with the hub."""
    behind = {kind.__name__ for cause in _causes(error) for kind in type(cause).__mro__}
    if "GatedRepoError" in behind:
        return f"{name} is gated: ask for access on its page of the hub, then type `hf auth login`; {LOCAL}."
    if "RepositoryNotFoundError" in behind:
        return f"The hub has no model {name}, or it is private: check the id, or `hf auth login`; {LOCAL}."
    if not hub_answers():
        return f"The Hugging Face hub cannot be reached, and its cache has not all of {name}; {LOCAL}."
    if "TransportError" in behind:
        return f"The download of {name} broke off: type the same again, and it goes on from there; {LOCAL}."
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What weights can be loaded as, by the names that users type."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model, and what came with it."""

    model: Any
    tokenizer: Any
    """None where the checkpoint carries none."""
    name: str


def load_model(
    name: str,
    *,
    dtype: str | torch.dtype | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
    stream: str = "off",
) -> Loaded:
    """Load a model and its tokenizer; the dtype is the checkpoint's own unless one is given.

    A streamed model ("on", or "auto" where memory is short) reads its layers one at a time.
    """
    name = fetched(name)
    source = resolve(name)
    with from_hub(source):
        return _load(
            source, name, dtype=dtype, device=device, trust_remote_code=trust_remote_code, stream=stream
        )


def _load(
    source: Source,
    name: str,
    *,
    dtype: str | torch.dtype | None,
    device: str,
    trust_remote_code: bool,
    stream: str,
) -> Loaded:
    weights = check_weights(source)
    config = read_config(source, trust_remote_code=trust_remote_code)
    if weights is not None:
        _check_size(config, weights, name)
    model_class = _class_for(config)
    if to_be_streamed(stream, source, device=device):
        with explained(f"Cannot load {name}"):
            model = load_layers_later(
                model_class, config, source.path, dtype=_dtype(dtype, source), device=device
            )
        mend_generation(model)
        return Loaded(model=model, tokenizer=_tokenizer(source, trust_remote_code), name=name)
    kwargs = {**source.kwargs, "trust_remote_code": trust_remote_code}
    with explained(f"Cannot load {name}"):
        model, info = model_class.from_pretrained(
            source.path,
            config=None if source.gguf else config,
            dtype=_dtype(dtype, source),
            output_loading_info=True,
            **({} if source.gguf else {"use_safetensors": True}),
            **kwargs,
        )
    _check_loaded(name, info)
    _forget_quantisation(model)
    mend_generation(model)
    model.to(device).eval()
    warn_of_slow_paths(model)
    return Loaded(model=model, tokenizer=_tokenizer(source, trust_remote_code), name=name)


def fetched(name: str) -> str:
    """The file of a built-in model, downloaded where it is not yet here; any other name as it is."""
    return str(fetch_model(name)) if name in REGISTRY_MODELS else name


def read_config(source: Source, *, trust_remote_code: bool) -> Any:
    """The config of a known family, or an error that says what is missing."""
    where = f"The config of {source.path}"
    if not source.gguf:
        raw = _raw_config(source)
        check_config(raw, where=where)
        if not trust_remote_code:
            _refuse_remote_code(source, raw)
    with explained(f"Cannot read the config of {source.path}"):
        config = transformers.AutoConfig.from_pretrained(
            source.path, trust_remote_code=trust_remote_code, **source.kwargs
        )
    if family_for(config).position_scale:
        check_position_scale(config, where=where)
    check_config(config.to_dict(), where=where)
    check_heads(config, where=where)
    if hasattr(config, "trisect") != config.model_type.startswith(PREFIX):
        raise TrisectError(
            f"{where}: model_type {PREFIX}... and a `trisect` entry go together; one is there."
        )
    return config


def read_shape(
    name: str, *, trust_remote_code: bool = False
) -> tuple[ModelShape, ModelShape, dict[str, Any]]:
    """Current and original shape and a few facts, from the config alone: no weights are read."""
    name = fetched(name)
    source = resolve(name)
    with from_hub(source):
        config = read_config(source, trust_remote_code=trust_remote_code)
    model = _blank(config, name).to(config.dtype or torch.float32)
    entry = getattr(config, "trisect", None) or {}
    info = {
        "family": family_for(config).name,
        "method": entry.get("method"),
        "asked_ratio": entry.get("ratio"),
        "quantization": packing_summary(entry.get("quantization")),
    }
    return shape_of(model), original_shape(model), info


def original_shape(model: Any) -> ModelShape:
    """The shape before any compression."""
    now = shape_of(model)
    layers = tuple(
        replace(shape, qk=w.qk, pairs=w.pairs, vo=w.vo, mlp=w.mlp, shared_output=False, linears=())
        for shape, w in zip(now.layers, original_widths(model), strict=True)
    )
    return replace(now, layers=layers)


def save_model(
    model: Any,
    tokenizer: Any,
    out: str | Path,
    *,
    receipt: dict[str, Any],
    layers: Sequence[Path] | None = None,
) -> Path:
    """Write a Hugging Face folder: weights, config with the plan, tokenizer, receipt, modelling file, card.

    A streamed model's `layers` are in files, one each, which become its shards.
    """
    if not isinstance(model, CompressedModel):
        raise TrisectError(
            "Only compressed models are saved by trisect; use model.save_pretrained for others."
        )
    # Quantised weights are buffers.
    size = sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))
    check_disk_space(out, int(size * 1.05))
    with new_folder(out) as folder:
        if layers is None:
            model.save_pretrained(folder)
        else:
            write_shards(model, layers, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        write_json(folder / "receipt.json", receipt)
        _add_company(folder, model, receipt)
        check_saved(model, folder)
    return Path(out)


def _add_company(folder: Path, model: Any, receipt: dict[str, Any]) -> None:
    """What people without trisect need: a modelling file that transformers can run, and a card to read."""
    names = {"model_class": type(model).__name__, "config_class": type(model.config).__name__}
    family = family_for(model.config)
    record = None if family.name in (*BUILT_IN, *WRAPPERS) else repr(family)
    write_bundle(folder, family=family.name, record=record, **names)
    sizes = Sizes(before=original_shape(model), after=shape_of(model))
    write_card(folder, receipt, sizes=sizes, entry=model.config.trisect, name=model.name_or_path)


def _class_for(config: Any) -> Any:
    family = family_for(config)
    if config.model_type.startswith(PREFIX):
        return compressed_class(family.name)
    return getattr(transformers, family.model)


def _blank(config: Any, name: str) -> Any:
    """The model without memory for its weights."""
    with torch.device("meta"), explained(f"Cannot build a model from the config of {name}"):
        return _class_for(config)(config)


def _check_size(config: Any, weights: Weights, name: str) -> None:
    """Refuse a config that asks for more than the files hold: before memory for it is."""
    where = f"The config of {name}"
    check_layers(config, len(weights.shapes), where=where)
    packed = getattr(config, "quantization_config", None) is not None
    check_fits(_blank(config, name), weights.shapes, size=weights.size, packed=packed, where=where)


def _raw_config(source: Source) -> Any:
    if source.local:
        return read_raw_config(source)
    with explained(f"Cannot read the config of {source.path}"):
        return transformers.PreTrainedConfig.get_config_dict(source.path)[0]


def _refuse_remote_code(source: Source, raw: Any) -> None:
    # A list, because the name may be anything, hashable or not.
    if "auto_map" in raw and raw.get("model_type") not in list(transformers.CONFIG_MAPPING):
        raise TrisectError(
            f"{source.path} brings its own code (auto_map in config.json). trisect runs it only when asked: "
            "add --trust-remote-code if you trust its authors."
        )


def _dtype(dtype: str | torch.dtype | None, source: Source) -> torch.dtype | str:
    if dtype is None:
        return torch.float32 if source.gguf else "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise TrisectError(f"Unknown dtype {dtype!r}; use one of {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def _check_loaded(name: str, info: dict[str, Any]) -> None:
    """transformers fills missing weights with random numbers and goes on; nobody wants that compressed."""
    missing = sorted(info["missing_keys"])
    if missing:
        raise TrisectError(
            f"{name} has no weights for {missing[0]}{_and_more(missing)}; the checkpoint is incomplete."
        )
    mismatched = [
        f"{key} (file {tuple(a)}, config {tuple(b)})" for key, a, b in sorted(info["mismatched_keys"])
    ]
    if mismatched:
        raise TrisectError(
            f"{name}: config.json does not fit the weights: {mismatched[0]}{_and_more(mismatched)}."
        )


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _forget_quantisation(model: Any) -> None:
    """A GGUF model arrives dequantised but still says it is quantised, and then refuses to be saved."""
    if getattr(model.config, "quantization_config", None) is None:
        return
    method = getattr(model.config.quantization_config, "quant_method", None)
    if method != "gguf" and getattr(model, "hf_quantizer", None) is not None:
        raise TrisectError(
            f"The checkpoint is quantised ({method}); compress the original weights and quantise the result."
        )
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


def _tokenizer(source: Source, trust_remote_code: bool) -> Any:
    if not source.has_tokenizer:
        return None
    with explained(f"Cannot load the tokenizer of {source.path}"):
        return transformers.AutoTokenizer.from_pretrained(
            source.path, trust_remote_code=trust_remote_code, **source.kwargs
        )
