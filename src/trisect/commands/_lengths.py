"""How long windows of text are where nobody says: as usual, or as the model can read."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trisect.config import CompressConfig

USUAL = 2048


def usual_length(model: Any) -> int:
    """2048 tokens, or the model's context where that is shorter."""
    from trisect.evaluate.likelihood import stated_contexts

    return min([USUAL, *stated_contexts(model)])


def of_usual_length(config: "CompressConfig", model: Any) -> "CompressConfig":
    """A configuration whose calibration windows fit into the model's context."""
    length = min(config.calibration.length, usual_length(model))
    return replace(config, calibration=replace(config.calibration, length=length))
