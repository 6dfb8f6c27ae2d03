"""What a model has to do: FLOPs by the paper's formulas, and the bytes that must be read.

The limits of a speed-up: prefill is held by FLOPs, decoding by bytes.
"""

from typing import Any

from torch import nn

from trisect.plan.budget import Flops, budget_of, cached_channels, layer_flops
from trisect.records.shapes import ModelShape


def model_flops(
    shape: ModelShape, *, batch: int, tokens: int, context: int, head: int = 0, logits: int = 1
) -> Flops:
    """All layers, and logits of `logits` tokens per sequence by a head of `head` parameters."""
    total = Flops(head=2 * batch * logits * head)
    for layer in shape.layers:
        total += layer_flops(layer, batch=batch, tokens=tokens, context=context)
    return total


def head_parameters(model: Any) -> int:
    """Elements of the matrix that makes logits."""
    head = model.get_output_embeddings()
    return 0 if head is None else int(head.weight.numel())


def parameter_bytes(model: nn.Module) -> int:
    """Everything that has to be held; a shared matrix counts once."""
    return sum(p.nbytes for p in model.parameters())


def read_bytes(model: Any) -> int:
    """Weights that every step must read: all but tables that are looked up, unless they make logits too."""
    head = model.get_output_embeddings()
    kept = None if head is None else head.weight
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    looked_up = [table for table in tables.values() if table is not kept]
    return parameter_bytes(model) - sum(table.nbytes for table in looked_up)


def kv_bytes(shape: ModelShape, *, batch: int, context: int) -> int:
    """The cache of `context` tokens in every sequence."""
    return batch * context * budget_of(shape).kv_bytes_per_token


def step_bytes(shape: ModelShape, *, weights: int, batch: int, context: float) -> int:
    """One decoding step: every weight once, keys and values of `context` tokens, one token written."""
    per_token = sum(map(cached_channels, shape.layers)) * shape.bytes_per_element
    return weights + round(batch * (context + 1) * per_token)
