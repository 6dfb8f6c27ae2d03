"""What must hold before a model is worth the work."""

from typing import Any

from torch import Tensor

from trisect.errors import TrisectError


def check_finite(model: Any) -> None:
    """Refuse a checkpoint with NaN or inf anywhere, by the parameter's name.

    Layers that are still in their files are looked at when they are read.
    """
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and not parameter.isfinite().all():
            raise TrisectError(
                f"{name} holds NaN or inf; the checkpoint is damaged or was saved from a run that diverged."
            )


def check_tokens(model: Any, ids: Tensor) -> None:
    """Refuse tokens the model has no embedding for."""
    rows = model.get_input_embeddings().weight.shape[0]
    if int(ids.max()) >= rows or int(ids.min()) < 0:
        raise TrisectError(
            f"The tokens go from {int(ids.min())} to {int(ids.max())}, but the model knows 0 to {rows - 1}; "
            "they were made with another tokenizer."
        )
