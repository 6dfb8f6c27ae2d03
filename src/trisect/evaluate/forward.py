"""What every measurement needs around a forward pass. Of other packages, only torch is imported."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trisect.errors import TrisectError


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inference mode without dropout; every module gets its own training flag back."""
    with flags_kept(model), torch.inference_mode():
        model.eval()
        yield


@contextmanager
def flags_kept(model: nn.Module) -> Iterator[None]:
    """Whoever switches the model to evaluation inside: every module gets its own training flag back."""
    training = [module for module in model.modules() if module.training]
    try:
        yield
    finally:
        for module in training:
            module.training = True


def check_batch_size(batch_size: int | None) -> None:
    """Refuse batches of nothing; None lets the measurement choose."""
    if batch_size is not None and batch_size < 1:
        raise TrisectError(f"The batch size is {batch_size}; give 1 or more, or None to choose.")


def input_device(model: Any) -> torch.device:
    """Where token ids must be."""
    device: torch.device = _embedding(model).device
    return device


def vocabulary(model: Any) -> int:
    """The number of ids that the model can read."""
    return int(_embedding(model).shape[0])


def _embedding(model: Any) -> torch.Tensor:
    weight: torch.Tensor = next(model.get_input_embeddings().parameters())
    return weight
