"""finetune(): attach adapters, train, merge. The model that comes back is an ordinary one again."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trisect.errors import TrisectError
from trisect.finetune.adapter import attach, logits_of, merge
from trisect.finetune.batches import collate
from trisect.finetune.check import check_model
from trisect.finetune.config import TuneConfig
from trisect.finetune.examples import Examples
from trisect.finetune.signals import stop_asked
from trisect.finetune.state import load_state, save_state
from trisect.finetune.training import Training
from trisect.models import fingerprint
from trisect.receipt import build_receipt, package_version

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class Stopped(KeyboardInterrupt):
    """Tuning was interrupted between two steps; `--resume` goes on from there."""

    def __init__(self, step: int, total: int, state: Path | None):
        super().__init__(f"stopped after step {step} of {total}")
        self.step, self.total, self.state = step, total, state


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What tuning made, and what happened on the way."""

    model: Any
    """The model that was given, its weights changed."""
    losses: list[float]
    receipt: dict[str, Any]
    """What is added to the model's receipt."""


def finetune(
    model: Any,
    examples: Examples,
    config: TuneConfig,
    *,
    state: Path | None = None,
    save_every: int = 50,
    resume: bool = False,
    progress: Progress | None = None,
) -> Tuned:
    """Tune a model in place, compressed or dense. With `state`, a file, an interrupted run can go on.

    Torch's own random numbers are the same afterwards as before. An interruption leaves the model adapted.
    """
    check_model(model, examples, config)
    identity = identify(model, examples, config)
    started = time.perf_counter()
    device = next(model.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        training = Training(attach(model, config), examples.items, config)
        if resume:
            if state is None:
                raise TrisectError("Resuming needs the file that the run was saved to.")
            started -= load_state(state, training, identity)
        first = training.step
        _train(training, identity, state=state, save_every=save_every, started=started, progress=progress)
    ids = collate([min(examples.items, key=lambda item: -item.learned)]).ids.to(device)
    apart = logits_of(training.adapted, ids)
    merge(training.adapted)
    merged = logits_of(model, ids)
    receipt = _receipt(training, examples, seconds=time.perf_counter() - started)
    receipt |= {
        "resumed_at": first if resume else None,
        "merge_difference": float((merged - apart).abs().max() / apart.abs().max()),
    }
    return Tuned(model=model, losses=training.losses, receipt=receipt)


def identify(model: Any, examples: Examples, config: TuneConfig) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    return {
        "model": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "data": examples.hash,
        **config.to_dict(),
    }


def _train(
    training: Training,
    identity: dict[str, Any],
    *,
    state: Path | None,
    save_every: int,
    started: float,
    progress: Progress | None,
) -> None:
    """Run to the end, the state saved every few steps, at the end, and when somebody interrupts."""

    def keep() -> None:
        if state is not None:
            save_state(state, training, identity, seconds=time.perf_counter() - started)

    def after_step() -> None:
        if training.step % save_every == 0 or training.step == training.total:
            keep()
        if progress is not None:
            progress(training.step, training.total)

    if progress is not None:
        progress(training.step, training.total)
    if training.config.gradient_checkpointing:
        # Not re-entrant: the re-entrant kind wants inputs that need gradients, and embeddings are frozen.
        training.adapted.gradient_checkpointing_enable({"use_reentrant": False})
    with stop_asked() as stop:
        finished = training.run(after_step=after_step, stop=stop)
    if training.config.gradient_checkpointing:
        training.adapted.gradient_checkpointing_disable()
    if not finished:
        keep()
        raise Stopped(training.step, training.total, state)


def _receipt(training: Training, examples: Examples, *, seconds: float) -> dict[str, Any]:
    receipt = build_receipt(
        training.config.to_dict(),
        seed=training.config.seed,
        token_hash=examples.hash,
        timings={"finetune": seconds},
    )
    receipt["versions"]["peft"] = package_version("peft")
    return {
        **receipt,
        "data": examples.to_dict(),
        "steps": training.step,
        "adapters": sum(name.endswith("lora_A.default.weight") for name in training.parameters),
        "trained_parameters": sum(p.numel() for p in training.parameters.values()),
        "losses": training.losses,
    }
