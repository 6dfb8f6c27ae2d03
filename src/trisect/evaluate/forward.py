"""What every measurement needs around a forward pass. Only torch is needed to import it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inference mode without dropout; every module gets its own training flag back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


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
