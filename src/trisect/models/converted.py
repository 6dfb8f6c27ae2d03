"""GGUF files read once: the model in float32 and the tokenizer, as transformers made them, kept by content."""

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from trisect.data.catalogue import cache_folder, file_hash
from trisect.errors import TrisectError
from trisect.support.files import check_disk_space, new_folder
from trisect.support.receipt import package_version

log = logging.getLogger(__name__)

SWITCH = "TRISECT_GGUF_CACHE"
"""An environment variable: 0 keeps nothing and reads nothing that was kept."""
CONVERTERS = ("transformers", "tokenizers", "gguf", "torch")
"""What the result depends on besides the file."""


def kept_folder(name: str) -> Path | None:
    """Where what is made of a GGUF file is kept, under its content; None for anything else, or if switched off."""
    file = Path(name)
    if os.environ.get(SWITCH) == "0" or file.suffix != ".gguf" or not file.is_file():
        return None
    try:
        content = file_hash(file)
    except OSError:
        return None  # whoever reads the file says why
    made_by = [content, *(f"{package} {package_version(package)}" for package in CONVERTERS)]
    return cache_folder() / "gguf" / hashlib.sha256("\n".join(made_by).encode()).hexdigest()


def keep(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a model and its tokenizer, whole or not at all; a cache without room is no reason to stop."""
    try:
        check_disk_space(folder, sum(parameter.nbytes for parameter in model.parameters()))
        with new_folder(folder) as partial:
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    except (OSError, TrisectError) as error:
        log.warning("the converted model is not kept for next time: %s", error)
