"""The settings of a tuning run, checked once."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from trisect.errors import TrisectError, option_name, unknown_name

LOSSES = ("response", "all")
LEAST = {"rank": 1, "alpha": 1, "epochs": 1, "max_steps": 1, "batch_size": 1, "accumulate": 1, "length": 2}
LEAST["seed"] = 0


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
    batch_size: int = 4
    accumulate: int = 4
    """Batches whose gradients make one step."""
    length: int = 512
    """Tokens of an example at most, or of a window of text."""
    loss: str = "response"
    """Tokens of instruction data that are learned: of the "response", or "all". Text is learned whole."""
    seed: int = 0
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            absent = name == "max_steps" and value is None
            if not absent and (type(value) is not int or value < least):
                option = option_name(name)
                raise TrisectError(f"{option} must be a whole number of {least} or more, not {value!r}.")
        if type(self.lr) not in (int, float) or not 0 < self.lr < math.inf:
            raise TrisectError(f"--lr must be a number above 0, not {self.lr!r}.")
        if self.loss not in LOSSES:
            raise unknown_name("loss", str(self.loss), LOSSES)

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON has them."""
        return {**asdict(self), "targets": None if self.targets is None else list(self.targets)}
