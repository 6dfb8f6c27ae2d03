"""How long windows of text are where nobody says: as usual, or as the model can read."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trisect.config import CompressConfig

USUAL = 2048


def usual_length(model: Any) -> int:
    """2048 tokens, or the model's context where that is shorter."""
    from trisect.evaluate.likelihood import CONTEXT_NAMES

    config = model.config.get_text_config()
    known = [getattr(config, name, None) for name in CONTEXT_NAMES]
    return min([USUAL, *(length for length in known if isinstance(length, int) and length > 1)])


def of_usual_length(config: "CompressConfig", model: Any) -> "CompressConfig":
    """A configuration whose calibration windows fit into the model's context."""
    length = min(config.calibration.length, usual_length(model))
    return replace(config, calibration=replace(config.calibration, length=length))
