"""Moments of a whole model in one file, collected once and cut at any ratio."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from trisect.calibrate import MomentsInfo, Progress, collect, save_moments
from trisect.calibrate.texts import with_tokens
from trisect.config import CompressConfig
from trisect.data import Tokens
from trisect.errors import TrisectError
from trisect.methods import get_method
from trisect.models import fingerprint
from trisect.models.fingerprint import check_finite
from trisect.pipeline.statistics import refuse_stored_moments
from trisect.records.parts import LINEARS


def calibrate(
    model: Any,
    config: CompressConfig,
    out: str | Path,
    *,
    tokenizer: Any = None,
    tokens: Tokens | None = None,
    progress: Progress | None = None,
) -> MomentsInfo:
    """Collect every moment a method reads and write them to one file."""
    method = get_method(config.method)
    refuse_stored_moments(method)
    check_finite(model)
    config, tokens = with_tokens(model, config, tokens, tokenizer=tokenizer, progress=progress)
    names = frozenset().union(*(reads for name, reads in method.reads.items() if _within(name, config.parts)))
    if any(name.endswith("_fisher") for name in names):
        raise TrisectError(
            f"{method.name} reads gradients, which stored moments do not hold; compress without --moments."
        )
    return store_moments(model, tokens, names, out, progress=progress, **config.calibration.how_to_run)


def store_moments(model: Any, tokens: Tokens, names: frozenset[str], out: str | Path, **how: Any) -> MomentsInfo:
    """The moments `names` of every layer, in one file."""
    found = collect(model, tokens.ids, lambda layer: names, **how)
    layers = {view.index: statistics for view, statistics in found}
    info = MomentsInfo(
        fingerprint=fingerprint(model),
        num_layers=len(layers),
        token_hash=tokens.hash,
        source=tokens.source,
        num_tokens=tokens.ids.numel(),
    )
    save_moments(out, layers, info)
    return info


def calibrated_as(config: CompressConfig, info: MomentsInfo) -> CompressConfig:
    """The config with the text that stored moments are of."""
    return replace(config, calibration=replace(config.calibration, source=info.source))


def _within(name: str, parts: tuple[str, ...]) -> bool:
    """Whether a component or linear map belongs to the parts asked for."""
    return any(name == part or name in LINEARS[part] for part in parts)
