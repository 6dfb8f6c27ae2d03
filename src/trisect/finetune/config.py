"""What a user chose about a tuning run, checked once."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from trisect.errors import TrisectError, option_name, unknown_name

LOSSES = ("response", "all")
SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """Everything but data and model that decides what the tuned weights will be."""

    rank: int = 8
    alpha: int = 16
    """The adapter adds alpha / rank times its product to a weight."""
    targets: tuple[str, ...] | None = None
    """Linear maps that get an adapter: q, k, v, o, gate, up, down; None means all of them."""
    epochs: int = 2
    max_steps: int | None = None
    """Stops earlier; the learning rate then comes down over these steps."""
    lr: float = 2e-4
    schedule: str = "cosine"
    warmup: float = 0.03
    """Share of the steps in which the learning rate rises."""
    batch_size: int = 4
    accumulate: int = 4
    """Batches whose gradients make one step."""
    length: int = 512
    """Tokens of an example at most, or of a window of text."""
    loss: str = "response"
    """Tokens of instruction data that are learned: of the "response", or "all". Text is learned whole."""
    weight_decay: float = 0.0
    clip: float = 1.0
    """Gradients longer than this are shortened to it."""
    seed: int = 0
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name in ("rank", "alpha", "epochs", "batch_size", "accumulate"):
            _check_count(name, getattr(self, name), 1)
        _check_count("length", self.length, 2)
        _check_count("seed", self.seed, 0)
        if self.max_steps is not None:
            _check_count("max_steps", self.max_steps, 1)
        for name in ("lr", "clip"):
            _check_number(name, getattr(self, name), positive=True)
        _check_number("weight_decay", self.weight_decay, positive=False)
        _check_number("warmup", self.warmup, positive=False)
        if self.warmup >= 1:
            raise TrisectError(f"warmup is a share of the steps, less than 1, not {self.warmup!r}.")
        if self.loss not in LOSSES:
            raise unknown_name("loss", str(self.loss), LOSSES)
        if self.schedule not in SCHEDULES:
            raise unknown_name("schedule", str(self.schedule), SCHEDULES)

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON has them."""
        settings = asdict(self)
        return {**settings, "targets": None if self.targets is None else list(self.targets)}


def _check_count(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise TrisectError(f"{option_name(name)} must be a whole number of {least} or more, not {value!r}.")


def _check_number(name: str, value: Any, *, positive: bool) -> None:
    fits = type(value) in (int, float) and math.isfinite(value) and (value > 0 if positive else value >= 0)
    if not fits:
        kind = "above 0" if positive else "of 0 or more"
        raise TrisectError(f"{option_name(name)} must be a number {kind}, not {value!r}.")
