"""Which examples make which step, and how they lie in a batch. The seed alone decides."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trisect.finetune.config import TuneConfig
from trisect.finetune.examples import Example

IGNORED = -100
"""The label of a token that does not count."""


@dataclass(frozen=True)
class Batch:
    """Examples side by side, (b, t), the shorter ones filled up at their end."""

    ids: Tensor
    mask: Tensor | None
    """None where nothing was filled up."""
    labels: Tensor

    def to(self, device: torch.device) -> "Batch":
        mask = None if self.mask is None else self.mask.to(device)
        return Batch(self.ids.to(device), mask, self.labels.to(device))


def count_steps(num_examples: int, config: TuneConfig) -> int:
    """Steps in all: every example once per epoch, unless `max_steps` ends it."""
    steps = math.ceil(config.epochs * num_examples / (config.batch_size * config.accumulate))
    return steps if config.max_steps is None else min(steps, config.max_steps)


def step_batches(examples: Sequence[Example], order: Tensor, step: int, config: TuneConfig) -> list[Batch]:
    """The batches of one step. Examples of like length share a batch, to have little to fill up."""
    size = config.batch_size * config.accumulate
    chosen = [examples[i] for i in order[step * size : (step + 1) * size].tolist()]
    chosen.sort(key=lambda example: len(example.ids))
    return [collate(chosen[i : i + config.batch_size]) for i in range(0, len(chosen), config.batch_size)]


def shuffled(num_examples: int, config: TuneConfig) -> Tensor:
    """Indices of examples for all epochs in a row, each epoch in its own order."""
    generator = torch.Generator().manual_seed(config.seed)
    return torch.cat([torch.randperm(num_examples, generator=generator) for _ in range(config.epochs)])


def collate(examples: Sequence[Example]) -> Batch:
    """One batch. Filling is at the end, so that every token keeps its position."""
    lengths = [len(example.ids) for example in examples]
    longest = max(lengths)
    ids = torch.zeros(len(examples), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, IGNORED)
    for row, (example, length) in enumerate(zip(examples, lengths, strict=True)):
        ids[row, :length] = torch.tensor(example.ids)
        mask[row, :length] = 1
        labels[row, example.first : length] = ids[row, example.first : length]
    return Batch(ids, None if min(lengths) == longest else mask, labels)
