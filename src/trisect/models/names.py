"""What transformers calls the tensors of a checkpoint, whose files may use the names of an older version."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key


def names_in_files(model: Any, files: Iterable[str], state: dict[str, Tensor]) -> dict[str, str]:
    """Name in the model -> name in the files; tensors that transformers would put together are left out."""
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if not isinstance(entry, WeightRenaming)]
    prefix = model.base_model_prefix
    found = {}
    for name in files:
        ours, converted = rename_source_key(name, renamings, converters, prefix, state)
        if converted is None:
            found[ours] = name
    return found


def tied_names(model: Any) -> set[str]:
    """Tensors that are another's under a second name, and need not be in the files."""
    tied = getattr(model, "_tied_weights_keys", None) or ()
    return set(tied) if model.config.tie_word_embeddings else set()
