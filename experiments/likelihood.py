"""How likely a model finds given continuations: what lm-eval-harness asks of it, without lm-eval.

Batches are put together as lm-eval's HFLM does (longest first, padded with zeros on the right, prompts cut
from the left), so that on one machine the numbers are the same. Only torch is needed to import this file.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from trisect.errors import TrisectError
from trisect.evaluate.perplexity import CONTEXT_NAMES, evaluating, input_device, vocabulary

Ids = Sequence[int]
Pair = Sequence[Ids]
"""Ids of a context, and of its continuation."""
Answer = tuple[float, bool]
"""Log-probability of the continuation in nats, and whether the model itself would write it."""


def answer(
    model: Any,
    requests: Sequence[Pair],
    *,
    batch_size: int,
    max_length: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Answer]:
    """For each (context, continuation): the sum of its log-probabilities, and whether it is greedy.

    Softmax is taken in the dtype of the logits, as HFLM does: give a float32 model for float32 sums. Prompts
    longer than `max_length` (None: the config's) lose their beginning. `progress` gets (requests done,
    requests in all).
    """
    length = context_length(model) if max_length is None else max_length
    if batch_size < 1:
        raise TrisectError(f"The batch size is {batch_size}; give 1 or more.")
    _check(requests, max_length=length, known=vocabulary(model))
    # Requests that differ in their last token only read the same rows of logits: one input for all of them.
    readers: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, (context, continuation) in enumerate(requests):
        readers[(*context, *continuation[:-1])].append(index)
    inputs = sorted(readers, key=lambda ids: (-len(ids), ids))
    answers: dict[int, Answer] = {}
    with evaluating(model):
        for start in range(0, len(inputs), batch_size):
            batch = {ids: readers[ids] for ids in inputs[start : start + batch_size]}
            answers |= _answer_batch(model, requests, batch, max_length=length)
            if progress is not None:
                progress(len(answers), len(requests))
    return [answers[index] for index in range(len(requests))]


def context_length(model: Any) -> int:
    """The most tokens that the config lets the model read, as lm-eval finds it."""
    config = getattr(model.config, "text_config", None) or model.config
    for name in CONTEXT_NAMES:
        value = getattr(config, name, None)
        if value is not None:
            return int(value)
    raise TrisectError(
        f"The config of {type(model).__name__} states no context ({', '.join(CONTEXT_NAMES)}): give "
        "max_length, as the file of requests has it."
    )


def _answer_batch(
    model: Any, requests: Sequence[Pair], batch: Mapping[tuple[int, ...], Sequence[int]], *, max_length: int
) -> dict[int, Answer]:
    """Answers by the number of the request; `batch` says which requests read each input."""
    cut = [ids[-max_length:] for ids in batch]
    padded = torch.zeros(len(cut), max(map(len, cut)), dtype=torch.int64)
    for row, ids in zip(padded, cut, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    logits = model(input_ids=padded.to(input_device(model)), use_cache=False).logits
    answers = {}
    for row, ids, readers in zip(logits, cut, batch.values(), strict=True):
        longest = max(len(requests[index][1]) for index in readers)
        logs = F.log_softmax(row[len(ids) - longest : len(ids)], dim=-1)
        greedy = logs.argmax(dim=-1)
        for index in readers:
            wanted = torch.tensor(requests[index][1], device=logs.device)
            values = logs[-len(wanted) :].gather(1, wanted.unsqueeze(-1)).squeeze(-1)
            total = float(values.sum())
            if math.isnan(total):
                raise TrisectError(
                    f"The model's logits are not finite on request {index} of {len(requests)}: try "
                    "--dtype float32; if that fails too, the weights are damaged."
                )
            answers[index] = (total, bool((greedy[-len(wanted) :] == wanted).all()))
    return answers


def _check(requests: Sequence[Pair], *, max_length: int, known: int) -> None:
    for index, (context, continuation) in enumerate(requests):
        where = f"Request {index} of {len(requests)}"
        if not context or not continuation:
            empty = "continuation" if context else "context"
            raise TrisectError(f"{where} has an empty {empty}: give at least one token of each.")
        if len(continuation) > max_length:
            raise TrisectError(
                f"{where} has a continuation of {len(continuation)} tokens, but the context holds "
                f"{max_length}: leave it out."
            )
        highest = max(max(context), max(continuation))
        if highest >= known:
            raise TrisectError(
                f"{where} holds the id {highest}, outside the model's vocabulary of {known}: make the ids "
                "with this model's own tokenizer."
            )
