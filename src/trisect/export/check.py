"""The exported model against the native one, before its files get their names."""

from typing import Any

import torch
from torch import Tensor

from trisect.errors import TrisectError

TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit, that float32 arithmetic may make."""

LENGTH = 320
REACH = 2048
"""Positions are checked up to here, so that slow rotations show too."""


@torch.no_grad()
def probe(model: Any, *, seed: int = 0) -> Tensor:
    """Logits (2, t, vocabulary) on random tokens: one text in a row, one spread over many positions."""
    config = model.config
    longest = int(config.max_position_embeddings)
    length = min(LENGTH, longest)
    ids = torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))
    positions = torch.stack([torch.arange(length), torch.linspace(0, min(longest, REACH) - 1, length).long()])
    device = next(model.parameters()).device
    # A mask, because transformers takes a jump in the positions for the start of another text.
    out = model(
        input_ids=ids.to(device),
        position_ids=positions.to(device),
        attention_mask=torch.ones_like(ids).to(device),
        use_cache=False,
    )
    logits: Tensor = out.logits.float().cpu()
    return logits


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest logit of `b`."""
    return float((a - b).abs().max() / b.abs().max())


def check_same(found: Tensor, expected: Tensor, what: str) -> float:
    """The difference, or a refusal to write files that compute something else."""
    apart = difference(found, expected)
    if not apart <= TOLERANCE:  # NaN is refused too
        raise TrisectError(
            f"{what} differs from the compressed model by {apart:.2g} of the largest logit, where rounding "
            f"explains {TOLERANCE:g}: nothing was written. This is a mistake of trisect; please report it "
            "with the receipt.json of the folder."
        )
    return apart
