"""Tiny models of every family, compressed."""

import copy
from functools import cache
from typing import Any

from tiny_models import tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.pipeline.run import compress


def narrow(name: str, *, attention: str | None = None, dtype: Any = None, **settings: Any) -> Any:
    """A tiny model without a quarter of each width, by a3; QK is cut whatever norm it has."""
    return copy.deepcopy(_narrow(name, attention, dtype, tuple(sorted(settings.items()))))


@cache
def _narrow(name: str, attention: str | None, dtype: Any, settings: tuple[tuple[str, Any], ...]) -> Any:
    """Kept: several tests ask for the same one, and all of them together are some megabytes."""
    model = tiny(name, attention=attention, dtype=dtype)
    config = CompressConfig(ratio=0.25, method="a3", align=None, qk_norm_tolerance=1.0, **dict(settings))
    return compress(model, config, tokens=tokens_from_tensor(tokens(4, 40))).model
