"""A recipe: models x methods x ratios x calibration sets, as records that were checked on reading."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trisect.compare.texts import DerivedText, WrittenText
from trisect.config import CalibrationConfig, CompressConfig

FIGURES = ("ratio", "bars", "diagnostic")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A named set of calibration tokens."""

    name: str
    config: CalibrationConfig


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A text that every cell is measured on: its first windows, without overlap."""

    name: str
    data: str
    length: int = 2048
    windows: int | None = None
    """None means all there are."""


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """Downstream tasks that every cell is measured on."""

    names: str
    """As `trisect eval --tasks` takes them: names with commas, or a preset."""
    limit: int | None = None
    """Questions per task."""
    shots: int | None = None
    """Examples in the prompt of tasks that do not state their own number."""


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """A model, the texts it is calibrated on, and those it is measured on."""

    name: str
    source: str
    dtype: str | None = None
    note: str = ""
    """What to say beside every number taken on this model."""
    calibrations: tuple[Calibration, ...]
    evaluations: tuple[Evaluation, ...]


@dataclass(frozen=True, kw_only=True)
class MethodEntry:
    """A method with its settings, the ratios it is asked for, and the models it is tried on."""

    name: str
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of CompressConfig, the recipe's defaults among them."""
    ratios: tuple[float, ...]
    models: tuple[str, ...]
    """Names of the models it is tried on."""

    def config(self, *, ratio: float, calibration: CalibrationConfig) -> CompressConfig:
        """What one cell asks for."""
        asked = {**self.settings, "method": self.name, "ratio": ratio, "calibration": calibration}
        return CompressConfig.from_dict(asked)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure to be made of the results; what is None means all there are, or the first."""

    kind: str
    evaluation: str | None = None
    ratio: float | None = None
    """For bars: which ratio."""
    parts: tuple[str, ...] = ("qk", "ov")
    """For the diagnostic: components that are cut alone and then together."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a comparison runs and shows."""

    name: str
    title: str
    note: str = ""
    models: tuple[ModelEntry, ...]
    methods: tuple[MethodEntry, ...]
    tasks: Tasks | None = None
    kv: bool = False
    """Show KV bytes per token."""
    figures: tuple[Drawing, ...] = ()
    texts: tuple[DerivedText | WrittenText, ...] = ()
