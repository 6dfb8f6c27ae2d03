"""What must hold before tuning is worth the work."""

from typing import Any

import torch

from trisect.errors import TrisectError
from trisect.evaluate.perplexity import check_positions
from trisect.finetune.config import TuneConfig
from trisect.finetune.examples import Examples
from trisect.methods import METHODS
from trisect.models.check import check_finite, check_tokens


def check_model(model: Any, examples: Examples, config: TuneConfig) -> None:
    """Refuse models and data that tuning would spoil or that would fail half-way."""
    if model.dtype == torch.float16:
        raise TrisectError(
            "Gradients vanish in float16; give --dtype float32 or --dtype bfloat16 (the result is saved so)."
        )
    _refuse_masked(model)
    if config.gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise TrisectError(
            f"{type(model).__name__} has no gradient checkpointing in transformers; leave it out."
        )
    longest = max(examples.items, key=lambda item: len(item.ids))
    check_tokens(model, torch.tensor([max(max(item.ids) for item in examples.items), *longest.ids]))
    check_positions(model, length=len(longest.ids))
    check_finite(model)


def _refuse_masked(model: Any) -> None:
    method = (getattr(model.config, "trisect", None) or {}).get("method")
    if method in METHODS and METHODS[method].masks:
        raise TrisectError(
            f"{method} saved zeros, and merging an adapter would fill them in again; tune the dense model "
            "before it is masked, or compress with a method that changes shapes (`trisect ls methods`)."
        )
