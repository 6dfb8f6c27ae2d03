"""What a model thinks of a continuation, added up by hand."""

from typing import Any

import torch


def log_probability(model: Any, tokenizer: Any, context: str, continuation: str) -> float:
    """Sum over the continuation's tokens, one plain forward pass."""
    whole = tokenizer(context + continuation, return_tensors="pt").input_ids
    start = len(tokenizer(context).input_ids)
    with torch.inference_mode():
        logs = model.eval()(whole).logits[0].double().log_softmax(-1)
    return sum(float(logs[at - 1, whole[0, at]]) for at in range(start, whole.shape[1]))
