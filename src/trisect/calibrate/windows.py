"""Which calibration windows this process runs, in which batches, and which of them are held out."""

from dataclasses import dataclass

import torch
from torch import Tensor

import trisect.workers as workers
from trisect.errors import TrisectError

# Tokens per forward pass when the caller does not say: enough to keep the matrix units busy.
TOKENS_PER_BATCH = 8192

# One window in four is held out: it chooses the ridge and takes no part in the fit that it is measured on.
HELD_SHARE = 4


@dataclass(frozen=True)
class Windows:
    """Batches of windows, those held out last."""

    batches: list[Tensor]  # each (b, t)
    numbers: list[Tensor]  # (b,) which windows of the whole set they are
    num_held: int
    """Batches at the end that are held out."""
    shared: bool
    """Whether other processes have the rest, so that sums have to be added up."""

    def held(self, batch: int) -> bool:
        return batch >= len(self.batches) - self.num_held


def in_batches(
    ids: Tensor, *, batch_size: int | None = None, hold_out: bool = False, split: bool = False
) -> Windows:
    """Windows (n, t) in batches; with `split`, this process's share of them.

    Every process has its part of the windows that fit and of those held out, so that the two sets are the
    same for any number of processes.
    """
    size = batch_size or max(1, TOKENS_PER_BATCH // ids.shape[1])
    num_held = max(1, len(ids) // HELD_SHARE) if hold_out else 0
    sets = torch.arange(len(ids)).split([len(ids) - num_held, num_held])
    shared = split and workers.count() > 1
    if shared:
        sets = tuple(numbers.tensor_split(workers.count())[workers.rank()] for numbers in sets)
        if not len(sets[0]) or (hold_out and not len(sets[1])):
            needed = workers.count() * (HELD_SHARE if hold_out else 1)
            raise TrisectError(
                f"{len(ids)} calibration windows are too few for {workers.count()} processes; "
                f"use --samples {needed} or more."
            )
    batches = [[numbers[start : start + size] for start in range(0, len(numbers), size)] for numbers in sets]
    numbers = [batch for batches_of_set in batches for batch in batches_of_set]
    return Windows(
        batches=[ids[batch] for batch in numbers],
        numbers=numbers,
        num_held=len(batches[1]),
        shared=shared,
    )
