"""Perplexity by position in the window: buckets are runs of positions, as equal in length as they can be."""

import math
from typing import Any

import torch
import torch.nn.functional as F

from trisect.data.tokens import Tokens
from trisect.evaluate.perplexity import evaluating, fitting_batch_size, input_device


def perplexity_by_position(
    model: Any, tokens: Tokens, *, buckets: int, batch_size: int | None = None
) -> dict[str, Any]:
    """Bucket i is about the tokens at positions edges[i] to edges[i + 1] - 1 of each window, from 0."""
    num_windows, length = tokens.ids.shape
    if not 1 <= buckets <= length - 1:
        raise ValueError(f"windows of {length} tokens predict {length - 1} positions, not {buckets} buckets of them")
    sums = torch.zeros(length - 1, dtype=torch.float64)
    with evaluating(model):
        for ids in tokens.ids.split(batch_size or fitting_batch_size(model, length=length)):
            ids = ids.to(input_device(model))
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            targets = ids[:, 1:].to(logits.device)
            nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
            sums += nats.double().sum(dim=0).cpu()
    # Position 0 has nothing before it and is not predicted.
    edges = [1 + i * (length - 1) // buckets for i in range(buckets + 1)]
    runs = list(zip(edges, edges[1:], strict=False))
    counts = [num_windows * (end - start) for start, end in runs]
    nll = [sums[s - 1 : e - 1].sum().item() / count for (s, e), count in zip(runs, counts, strict=True)]
    said = {"edges": edges, "nll": nll, "perplexity": [math.exp(value) for value in nll], "tokens": counts}
    return said | {"data": tokens.source, "token_hash": tokens.hash}
