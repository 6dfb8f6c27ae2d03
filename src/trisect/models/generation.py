"""Settings for text generation that a checkpoint brings along."""

import logging
from typing import Any

import transformers

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
