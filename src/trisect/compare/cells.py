"""Cells: one model, one method, one ratio, one calibration set. Each runs at most once, known by its key."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from trisect.compare.recipe import Calibration, MethodEntry, ModelEntry, Recipe, Tasks
from trisect.config import CompressConfig
from trisect.methods import get_method

FORMAT = 1
"""Part of every key: raise it when receipts of the version before must not be used any more."""

# These are in a key whatever they are; other fields only where they are not at their default, so that a new
# option does not make every receipt there is worthless.
ALWAYS = (
    "ratio",
    "method",
    "parts",
    "layers",
    "align",
    "allocate",
    "qk_norm_tolerance",
    "calibration",
    "seed",
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One thing to compress and measure: a place in a recipe's table."""

    model: ModelEntry
    method: MethodEntry | None = None
    """None for the dense model."""
    calibration: Calibration | None = None
    config: CompressConfig | None = None
    tasks: Tasks | None = None

    @property
    def label(self) -> str:
        return "dense" if self.method is None else self.method.label

    @property
    def ratio(self) -> float:
        """What was asked for; a recipe has no other goal."""
        return 0.0 if self.config is None else self.config.ratio or 0.0

    @property
    def key(self) -> str:
        """Of what the recipe says about the result; names, labels, titles and figures are not in it."""
        said = {
            "format": FORMAT,
            "model": {"source": self.model.source, "dtype": self.model.dtype},
            "config": None if self.config is None else _deciding(self.config),
            "evaluation": [[text.data, text.length, text.windows] for text in self.model.evaluations],
            "tasks": None if self.tasks is None else asdict(self.tasks),
        }
        return content_key(said)

    def describe(self) -> str:
        """One line for a person."""
        if self.config is None or self.calibration is None:
            return f"{self.model.name}, dense"
        several = len(self.model.calibrations) > 1
        calibrated = f", calibrated on {self.calibration.name}" if several else ""
        return f"{self.model.name}, {self.label} at {self.ratio:g}{calibrated}"


def cells_of(recipe: Recipe) -> Iterator[Cell]:
    """All cells: model by model, the dense one first, then calibration by calibration."""
    for model in recipe.models:
        yield Cell(model=model, tasks=recipe.tasks)
        for calibration in model.calibrations:
            for method in recipe.methods:
                if model.name not in method.models:
                    continue
                for ratio in method.ratios:
                    config = method.config(ratio=ratio, calibration=calibration.config)
                    yield Cell(
                        model=model,
                        method=method,
                        calibration=calibration,
                        config=config,
                        tasks=recipe.tasks,
                    )


def allocation(config: CompressConfig) -> str:
    """How widths are spread: as the config says, or as the method does by itself."""
    return config.allocate or get_method(config.method).allocate


def content_key(value: Any) -> str:
    """A short hash of plain data, the same on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _deciding(config: CompressConfig) -> dict[str, Any]:
    default = CompressConfig(ratio=config.ratio).to_dict()
    found = {n: value for n, value in config.to_dict().items() if n in ALWAYS or value != default[n]}
    del found["calibration"]["states"]  # where hidden states lie changes no result
    return {**found, "allocate": allocation(config)}
