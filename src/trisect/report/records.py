"""What the report knows of a run: plain records, read once, shown in many ways."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trisect.records.parts import Spectrum
from trisect.records.shapes import ModelShape

SIZE, PERPLEXITY, TASK, SPEED, LATENCY = "size", "perplexity", "task", "speed", "latency"
BEFORE, AFTER = "before", "after"


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What is measured. Two runs can be compared where theirs are equal."""

    kind: str
    name: str
    detail: str = ""
    """What it was measured on."""
    key: str = ""
    """Tells apart what has the same name, e.g. the hash of a text's tokens."""
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One number about one model."""

    model: str
    """As it was typed."""
    quantity: Quantity
    value: float
    side: str | None = None
    """`BEFORE` or `AFTER` where the file itself says so; else the model's name decides."""
    error: float | None = None
    """Its standard error, where the file says it."""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A quantity on both sides of the cut; None where nobody measured it."""

    quantity: Quantity
    before: float | None
    after: float | None
    error: float | None = None
    """Standard error of the difference, where it is known."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What a solver says of one component (or linear map) of one layer."""

    layer: int
    component: str
    width: int
    loss: float
    total: float
    note: str
    spectrum: Spectrum | None = None

    @property
    def share(self) -> float | None:
        """Of the objective; None for an untouched part, which has nothing at stake."""
        return self.loss / self.total if self.total > 0 else None


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One try of a search for the smallest model within a bound."""

    ratio: float
    rise: float
    inside: bool


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt and how the models go on."""

    prompt: str
    texts: tuple[tuple[str, str], ...]
    """(model, continuation or why there is none)."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, as far as the report can know it."""

    name: str
    """For people; no two runs of a report share one."""
    folder: Path
    source: str | None
    """The model it was made from, as it was typed."""
    method: str
    ratio: float
    """Asked for."""
    before: ModelShape
    after: ModelShape
    weight_bytes: int
    """Of the weight files."""
    receipts: tuple[dict[str, Any], ...]
    """The folder's own, then those of the models it was made from."""
    losses: tuple[Loss, ...]
    trials: tuple[Trial, ...]
    timings: dict[str, float]
    facts: tuple[Fact, ...] = ()

    def fact(self, quantity: Quantity) -> Fact | None:
        return next((fact for fact in self.facts if fact.quantity == quantity), None)

    @property
    def compression(self) -> dict[str, Any]:
        """The receipt of the compression itself: quantising puts its own on top."""
        return next((receipt for receipt in self.receipts if "plan" in receipt), self.receipts[0])

    @property
    def tunings(self) -> list[dict[str, Any]]:
        return [entry for receipt in self.receipts for entry in receipt.get("tuning") or []]
