"""Is this the model that a file was made for? A hash of its shapes and of a few weights of every layer."""

import hashlib
from typing import Any

from torch import Tensor, nn

from trisect.errors import TrisectError
from trisect.models.view import LayerView, layer_views, shape_of


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


SAMPLE = 64
"""Weights of each projection that are looked at."""


def fingerprint(model: nn.Module) -> str:
    """The same for the same model, in memory or still in its files."""
    digest = hashlib.sha256(repr(shape_of(model).layers).encode())
    for view in layer_views(model):
        for module in view.projections():
            sample = _corner(model, view, module).flatten()[:SAMPLE].float().cpu()
            digest.update(sample.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _corner(model: Any, view: LayerView, module: Any) -> Tensor:
    """The first elements of a weight in (in, out) order, without touching the rest."""
    stored = weight = module.weight
    if weight.is_meta:
        name = next(name for name, parameter in view.layer.named_parameters() if parameter is weight)
        stored = model.layer_store.peek(view.index, name)
    if type(module) is not nn.Linear:  # stored as (in, out), or in groups
        found: Tensor = stored[: -(-SAMPLE // weight[0].numel())]
        return found.detach()
    columns: Tensor = stored[:, : -(-SAMPLE // weight.shape[0])]
    return columns.detach().T
