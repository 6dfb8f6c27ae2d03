"""Moments that several cells can be solved from, collected once per model and calibration set."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trisect.calibrate import READINGS, Progress, collect
from trisect.compare.cells import Cell, content_key
from trisect.config import CompressConfig
from trisect.data import Tokens
from trisect.errors import TrisectError
from trisect.methods import get_method
from trisect.models import fingerprint
from trisect.models.fingerprint import check_finite, check_tokens
from trisect.pipeline.stored_moments import refuse_stored_moments, store_moments
from trisect.records.parts import LINEARS
from trisect.support.files import check_disk_space

log = logging.getLogger(__name__)

LIMIT_BYTES = 1 << 30
"""More than this is collected anew for each cell: Grams of whole inputs soon fill a disk."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A moments file, and the moments in it."""

    path: Path
    names: frozenset[str]

    def path_for(self, config: CompressConfig) -> Path | None:
        """The file, if it has all that this config's method reads."""
        names = reads_of(config)
        return self.path if names is not None and names <= self.names else None


def reads_of(config: CompressConfig) -> frozenset[str] | None:
    """The moments of the dense model that a method reads; None where those cannot be all it needs."""
    method = get_method(config.method)
    try:
        refuse_stored_moments(method)
    except TrisectError:
        return None
    # Methods on linear maps say what they read map by map.
    pieces = [name for part in config.parts for name in (part, *LINEARS[part])]
    names = frozenset().union(*(method.reads.get(piece, frozenset()) for piece in pieces))
    return names if names <= set(READINGS) and not method.in_order else None


def stored_moments(
    model: Any,
    tokens: Tokens,
    cells: Iterable[Cell],
    *,
    folder: Path,
    batch_size: int | None,
    progress: Progress | None,
    say: Callable[[str], None],
) -> Stored | None:
    """The moments these cells of one model and calibration set share, from their file or collected now."""
    wanted: dict[str, frozenset[str]] = {}
    for config in (cell.config for cell in cells if cell.config is not None):
        names = reads_of(config)
        if names:
            wanted[config.method] = wanted.get(config.method, frozenset()) | names
    if not wanted:
        return None
    names = _within_limit(wanted, _sizes(model, tokens, frozenset().union(*wanted.values())), say=say)
    if not names:
        return None
    key = content_key([fingerprint(model), tokens.hash, sorted(names)])
    stored = Stored(path=folder / f"moments-{key}.safetensors", names=names)
    if not stored.path.exists():
        _collect(model, tokens, stored, batch_size=batch_size, progress=progress)
    return stored


def _sizes(model: Any, tokens: Tokens, names: frozenset[str]) -> dict[str, int]:
    """Bytes of each moment over all layers, from one window through the first layer."""
    check_finite(model)
    check_tokens(model, tokens.ids)
    layers = model.config.get_text_config().num_hidden_layers
    _, first = next(collect(model, tokens.ids[:1], lambda layer: names))
    # A moment that this family never computes takes no room.
    return {
        name: layers * first[name].numel() * first[name].element_size() if name in first else 0
        for name in names
    }


def _within_limit(
    wanted: Mapping[str, frozenset[str]], sizes: Mapping[str, int], *, say: Callable[[str], None]
) -> frozenset[str]:
    """What the cheapest methods read, as many of them as fit."""
    kept: frozenset[str] = frozenset()
    for method in sorted(wanted, key=lambda method: (sum(sizes[name] for name in wanted[method]), method)):
        size = sum(sizes[name] for name in kept | wanted[method])
        if size <= LIMIT_BYTES:
            kept |= wanted[method]
        else:
            say(f"{method} would need {size / 2**20:.0f} MiB of stored moments: collected anew for each cell")
    return kept


def _collect(
    model: Any, tokens: Tokens, stored: Stored, *, batch_size: int | None, progress: Progress | None
) -> None:
    check_disk_space(stored.path, LIMIT_BYTES)
    store_moments(model, tokens, stored.names, stored.path, batch_size=batch_size, progress=progress)
