"""Load and save: hub ids, folders, GGUF files, registry names in; a plain Hugging Face folder out."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from trisect.data.registry import REGISTRY_MODELS, fetch_model
from trisect.errors import TrisectError
from trisect.files import check_disk_space, new_folder, write_json
from trisect.models.compressed import CompressedModel, compressed_class, original_widths
from trisect.models.factored import GroupedLinear
from trisect.models.families import PREFIX, family_for
from trisect.models.linear import weight_of
from trisect.models.source import Source, check_weights, resolve
from trisect.models.view import layer_views, shape_of
from trisect.shapes import ModelShape


@dataclass(frozen=True, kw_only=True)
class Loaded:
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
) -> Loaded:
    """Load a model and its tokenizer; the dtype is the checkpoint's own unless one is given."""
    if name in REGISTRY_MODELS:
        name = str(fetch_model(name))
    source = resolve(name)
    check_weights(source)
    config = read_config(source, trust_remote_code=trust_remote_code)
    model_class = _class_for(config)
    kwargs = {**source.kwargs, "trust_remote_code": trust_remote_code}
    with _explained(f"Cannot load {name}"):
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
    model.to(device).eval()
    return Loaded(model=model, tokenizer=_tokenizer(source, trust_remote_code), name=name)


def read_config(source: Source, *, trust_remote_code: bool) -> Any:
    """The config of a known family, or an error that says what is missing."""
    if not source.gguf and not trust_remote_code:
        _refuse_remote_code(source)
    with _explained(f"Cannot read the config of {source.path}"):
        config = transformers.AutoConfig.from_pretrained(
            source.path, trust_remote_code=trust_remote_code, **source.kwargs
        )
    family_for(config)
    return config


def read_shape(
    name: str, *, trust_remote_code: bool = False
) -> tuple[ModelShape, ModelShape, dict[str, Any]]:
    """Current and original shape and a few facts, from the config alone: no weights are read."""
    if name in REGISTRY_MODELS:
        name = str(fetch_model(name))
    config = read_config(resolve(name), trust_remote_code=trust_remote_code)
    with torch.device("meta"), _explained(f"Cannot build a model from the config of {name}"):
        model = _class_for(config)(config).to(config.dtype or torch.float32)
    entry = getattr(config, "trisect", None) or {}
    info = {
        "family": family_for(config).name,
        "method": entry.get("method"),
        "asked_ratio": entry.get("ratio"),
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


def save_model(model: Any, tokenizer: Any, out: str | Path, *, receipt: dict[str, Any]) -> Path:
    """Write a Hugging Face folder: safetensors, config with the plan, tokenizer, receipt.json."""
    if not isinstance(model, CompressedModel):
        raise TrisectError(
            "Only compressed models are saved by trisect; use model.save_pretrained for others."
        )
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    check_disk_space(out, int(size * 1.05))
    with new_folder(out) as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        write_json(folder / "receipt.json", receipt)
    return Path(out)


def fingerprint(model: nn.Module) -> str:
    """A hash of the layer shapes and a few rows of every layer's weights: the same model, or not."""
    digest = hashlib.sha256(repr(shape_of(model).layers).encode())
    for view in layer_views(model):
        for module in view.projections():
            weight = module.weight if isinstance(module, GroupedLinear) else weight_of(module)
            sample = weight.detach().flatten()[:64].float().cpu()
            digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


def _class_for(config: Any) -> Any:
    family = family_for(config)
    if config.model_type.startswith(PREFIX):
        return compressed_class(family.name)
    return getattr(transformers, family.model)


def _refuse_remote_code(source: Source) -> None:
    with _explained(f"Cannot read the config of {source.path}"):
        raw, _ = transformers.PreTrainedConfig.get_config_dict(source.path)
    if "auto_map" in raw and raw.get("model_type") not in transformers.CONFIG_MAPPING:
        raise TrisectError(
            f"{source.path} brings its own code (auto_map in config.json). trisect runs it only when asked: "
            "add --trust-remote-code if you trust its authors."
        )


def _dtype(dtype: str | torch.dtype | None, source: Source) -> torch.dtype | str:
    if dtype is None:
        return torch.float32 if source.gguf else "auto"
    if isinstance(dtype, torch.dtype):
        return dtype
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in known:
        raise TrisectError(f"Unknown dtype {dtype!r}; use one of {', '.join(known)}.")
    return known[dtype]


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
    with _explained(f"Cannot load the tokenizer of {source.path}"):
        return transformers.AutoTokenizer.from_pretrained(
            source.path, trust_remote_code=trust_remote_code, **source.kwargs
        )


class _explained:
    """Loading libraries raise many things for a damaged checkpoint; the user gets their first line."""

    def __init__(self, what: str):
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, TrisectError) or not isinstance(error, Exception):
            return
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise TrisectError(f"{self.what}: {lines[0][:400]}") from error
