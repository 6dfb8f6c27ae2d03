"""Tokenizers that transformers read from GGUF: digits are split again, as they were before the vocabulary."""

import copy
import json
import re
from typing import Any

from tokenizers import pre_tokenizers

NOTE = "the tokenizer splits digits again, a step that transformers leaves out when it reads GGUF"


def split_digits(tokenizer: Any) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer, repaired where digits were evidently split when its vocabulary was made; and a note.

    GGUF files name this step, transformers drops it, and then runs of spaces and lines before a number become
    other tokens. What remains to be seen is a vocabulary of single digits without any longer number.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not _lost(json.loads(backend.to_str())):
        return tokenizer, ()
    repaired = copy.deepcopy(tokenizer)
    repaired.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return repaired, (NOTE,)


def _lost(data: dict[str, Any]) -> bool:
    words = data.get("pre_tokenizer") or {}
    plain = words.get("type") == "ByteLevel" and words.get("use_regex", True)
    vocabulary = data["model"].get("vocab") or {}
    if not plain or words.get("add_prefix_space") or not isinstance(vocabulary, dict):
        return False
    return set("0123456789") <= set(vocabulary) and not any(
        re.search("[0-9]{2}", token) for token in vocabulary
    )
