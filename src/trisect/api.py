"""The three calls most people need."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from trisect import pipeline
from trisect.config import CalibrationConfig, CompressConfig
from trisect.data import Tokens, load_tokens
from trisect.errors import TrisectError
from trisect.models import load_model, save_model
from trisect.target import compress_within


def compress(
    model: Any,
    ratio: float | None = None,
    *,
    max_ppl_increase: str | float | None = None,
    method: str = "a3+",
    calibration: str | CalibrationConfig | Tensor | Tokens | None = None,
    tokenizer: Any = None,
    config: CompressConfig | None = None,
    device: str = "cpu",
) -> Any:
    """Compress a model (an object, or anything `trisect ls models` and folders can name).

    The goal is a `ratio` to remove, and then an object is compressed in place; or `max_ppl_increase` ("5%"),
    and then the smallest copy that was found inside this bound comes back, the model given staying as it is.
    `calibration` is a source name or file, a CalibrationConfig, or token ids of shape (windows, length).
    `config` replaces goal and `method` where more is to be said. The result has a `receipt`.
    """
    if isinstance(model, str | Path):
        loaded = load_model(str(model), device=device)
        model, tokenizer = loaded.model, tokenizer or loaded.tokenizer
    if config is None:
        if ratio is None and max_ppl_increase is None:
            raise TrisectError(
                "Say how much to remove, compress(model, ratio=0.25), or how much perplexity may rise, "
                "compress(model, max_ppl_increase='5%')."
            )
        config = CompressConfig(ratio=ratio, max_ppl_increase=max_ppl_increase, method=method)
    tokens = None
    if isinstance(calibration, str):
        config = replace(config, calibration=replace(config.calibration, source=calibration))
    elif isinstance(calibration, CalibrationConfig):
        config = replace(config, calibration=calibration)
    elif calibration is not None:
        c = config.calibration
        tokens = load_tokens(calibration, tokenizer, samples=c.samples, length=c.length)
    carry_out = pipeline.compress if config.max_ppl_increase is None else compress_within
    result = carry_out(model, config, tokenizer=tokenizer, tokens=tokens)
    result.model.tokenizer = tokenizer
    return result.model


def save(model: Any, out: str | Path, *, tokenizer: Any = None) -> Path:
    """Write a compressed model as a Hugging Face folder with its plan and receipt."""
    tokenizer = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
    return save_model(model, tokenizer, out, receipt=model.receipt or {})


def load(folder: str | Path, *, dtype: str | None = None, device: str = "cpu") -> Any:
    """Load a folder that `save` wrote (or any model trisect knows)."""
    loaded = load_model(str(folder), dtype=dtype, device=device)
    loaded.model.tokenizer = loaded.tokenizer
    return loaded.model
