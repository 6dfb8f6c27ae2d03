"""The training loop: AdamW on the adapters, steps that are whole or did not happen."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trisect.errors import TrisectError
from trisect.evaluate.forward import input_device
from trisect.finetune.adapter import adapter_parameters
from trisect.finetune.batches import IGNORED, Batch, count_steps, shuffled, step_batches
from trisect.finetune.config import TuneConfig
from trisect.finetune.examples import Example
from trisect.finetune.schedule import rate_at


class Training:
    """An adapted model on its way: parameters, optimiser, and the step it is at."""

    def __init__(self, adapted: Any, examples: Sequence[Example], config: TuneConfig):
        self.adapted, self.examples, self.config = adapted, examples, config
        self.parameters = adapter_parameters(adapted)
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=config.lr, weight_decay=config.weight_decay
        )
        self.order = shuffled(len(examples), config)
        self.total = count_steps(len(examples), config)
        self.device = input_device(adapted)
        self.step = 0
        self.losses: list[float] = []
        """Mean loss of a learned token, step by step."""

    def run(
        self, *, after_step: Callable[[], None] = lambda: None, stop: Callable[[], bool] = lambda: False
    ) -> bool:
        """Train to the end: True; or to the last whole step before `stop` says so: False."""
        self.adapted.train()
        while self.step < self.total:
            if not self._take_step(stop):
                return False
            after_step()
        return True

    def _take_step(self, stop: Callable[[], bool]) -> bool:
        before = random_state(self.device)
        batches = step_batches(self.examples, self.order, self.step, self.config)
        learned = sum(int((batch.labels[:, 1:] != IGNORED).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            if stop():
                # As if this step had not begun: the next run will begin it with the same random numbers.
                self.optimizer.zero_grad(set_to_none=True)
                set_random_state(before, self.device)
                return False
            loss = summed_loss(self.adapted, batch.to(self.device)) / learned
            loss.backward()
            total += loss.item()
        self._check_finite(total)
        torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), self.config.clip)
        share = rate_at(self.step, self.total, schedule=self.config.schedule, warmup=self.config.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * share
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.losses.append(total)
        return True

    def _check_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise TrisectError(
                f"The loss is {loss} at step {self.step + 1}; no model was written. Start again with a "
                "smaller --lr, or with --dtype float32."
            )


def summed_loss(model: Any, batch: Batch) -> Tensor:
    """Negative log-likelihood of all learned tokens of a batch, in nats."""
    logits = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits
    targets = batch.labels[:, 1:]
    learned = targets != IGNORED
    return F.cross_entropy(logits[:, :-1][learned].float(), targets[learned], reduction="sum")


def random_state(device: torch.device) -> dict[str, Tensor]:
    """State of the generators that dropout draws from."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
