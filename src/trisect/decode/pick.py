"""Which token comes next: the likeliest one, or one drawn."""

from collections.abc import Callable

import torch
from torch import Tensor

Pick = Callable[[Tensor], Tensor]
"""Logits (b, v) -> tokens (b,), without asking the host: it may be recorded in a CUDA graph."""


def likeliest(logits: Tensor) -> Tensor:
    """The token with the largest logit; of equals, the first."""
    return logits.argmax(dim=-1)


def drawn(*, temperature: float = 1.0, vocabulary: int | None = None) -> Pick:
    """Draw from softmax(logits / temperature) over the first `vocabulary` tokens.            [math.md W-1]

    Random numbers are those of torch's own generator.
    """

    def draw(logits: Tensor) -> Tensor:
        shares = (logits[:, :vocabulary].float() / temperature).softmax(dim=-1)
        # Not torch.multinomial: it looks at the shares on the host first.
        waits = torch.empty_like(shares).exponential_().clamp_(min=torch.finfo(shares.dtype).tiny)
        return (shares / waits).argmax(dim=-1)

    return draw
