"""The receipt: what is needed to repeat a run and to check its result.

Anybody may have written a file: the pydantic models take exactly what is declared and refuse the rest.
"""

import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from trisect.support.checks import read_json, shown, validated

LONGEST_TEXT = 1000
PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "numpy")


def build_receipt(
    recipe: Mapping[str, Any], *, seed: int, token_hash: str | None, timings: Mapping[str, float]
) -> dict[str, Any]:
    """A JSON-ready record of a run: `recipe` is the configuration, `timings` seconds by stage."""
    return {
        "recipe": dict(recipe),
        "seed": seed,
        "token_hash": token_hash,
        "timings": {stage: round(seconds, 3) for stage, seconds in timings.items()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "trisect": package_version("trisect"),
        "commit": package_commit(),
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in PACKAGES},
        "hardware": hardware(),
    }


def read_receipt(folder: str | Path) -> dict[str, Any]:
    """The receipt in a model's folder, empty where there is none; its parts are what their readers expect."""
    path = Path(folder) / "receipt.json"
    return receipt_of(read_json(path), path).whole if path.is_file() else {}


def receipt_of(data: Any, path: Path) -> "Receipt":
    """The content of a file as a receipt, or one line about what is wrong with it."""
    whole = {**data, "whole": data} if isinstance(data, dict) else data
    return validated(Receipt, whole, where=f"{path} is no receipt of trisect", hint="mend it or remove it")


def _one_line(text: str) -> str:
    """Receipts end up in tables of model cards."""
    if not text.isprintable() or len(text) > LONGEST_TEXT:
        raise ValueError(f"{shown(text)} is no text of one line")
    return text


Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Line = Annotated[str, AfterValidator(_one_line)]


class Entry(BaseModel):
    """A part of a JSON file: no text is taken for a number, and no key that is not declared is read."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class Spectrum(Entry):
    """What the channels or neurons of a part carry, the largest first, as shares of all energy."""

    of: str
    length: Count
    values: Annotated[list[float], Field(min_length=1, max_length=1000)]

    @model_validator(mode="after")
    def _shares_that_fall(self) -> Self:
        falls = [1.0, *self.values, 0.0]
        if len(self.values) > self.length or falls != sorted(falls, reverse=True):
            raise ValueError("a spectrum has shares that fall from 1 to 0, at most one per channel")
        return self


class Loss(Entry):
    """What a solver says of one component (or linear map) of one layer."""

    layer: Annotated[int, Field(ge=0, lt=10_000)]
    component: str
    width: Count
    loss: float
    total: float
    note: str = ""
    spectrum: Spectrum | None = None

    @property
    def share(self) -> float | None:
        """Of the objective that is lost; None for an untouched part, which has nothing to lose."""
        return self.loss / self.total if self.total > 0 else None


class Perplexity(Entry):
    """Perplexity of one model on one text."""

    perplexity: float | None
    data: Line
    token_hash: str
    windows: Count | None = None
    length: Count | None = None

    @property
    def value(self) -> float:
        """JSON has no infinity, so a perplexity beyond every float is null."""
        return math.inf if self.perplexity is None else self.perplexity

    @property
    def name(self) -> str:
        return Path(self.data).name

    @property
    def size(self) -> str:
        return "" if self.windows is None else f"{self.windows} windows of {self.length} tokens"


class Sides(Entry):
    """Perplexity before and after something was done to a model."""

    before: Perplexity | None = None
    after: Perplexity | None = None


class Record(Entry):
    """A whole record of trisect: null means that there is nothing."""

    perplexity: Sides | float | None = None  # of the only text
    perplexities: list[Sides] = []  # one entry per text
    timings: dict[str, float] = {}
    model: Any = None

    @property
    def texts(self) -> list[Sides]:
        """Perplexity before and after, one entry per text."""
        return self.perplexities or ([self.perplexity] if isinstance(self.perplexity, Sides) else [])

    @model_validator(mode="before")
    @classmethod
    def _null_is_nothing(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class Tuning(Record):
    """One fine-tuning of a model."""

    losses: list[float] = []
    held_out: list[Sides] = []


class Receipt(Record):
    """How a model was made."""

    recipe: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    hardware: dict[str, Any] = {}
    plan: dict[str, Any] | None = None
    losses: list[Loss] = []
    tuning: list[Tuning] = []
    source: Any = None
    source_bytes: Annotated[int, Field(gt=0)] | None = None  # of the weight files of the model that it was made from
    made_from: Any = None
    whole: dict[str, Any]  # as it was written

    @model_validator(mode="after")
    def _fits_a_card(self) -> Self:
        for text in (*self.whole.values(), *self.recipe.values()):
            _one_line(text if isinstance(text, str) else "")
        if not isinstance(calibration := self.recipe.get("calibration") or {}, dict):
            raise ValueError(f"calibration is {shown(calibration)}")
        return self


@cache
def package_version(name: str) -> str | None:
    """The installed version of a package, None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def package_commit() -> str | None:
    """The git commit this package runs from, "-dirty" if changed; None outside a checkout."""
    # The variable is for a copy of the files, without their history.
    return os.environ.get("TRISECT_COMMIT") or _checkout()


@cache
def _checkout() -> str | None:
    """The commit when a process first needs it: later changes are not in the code that it runs."""
    # A virtual environment may lie inside some other repository: ask whether this file is tracked.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def hardware() -> dict[str, Any]:
    """The processor, its usable cores, and the GPU if there is one."""
    import torch

    # Whether a GPU may round what float32 products are made of moves a figure's end.
    rounds = "" if torch.get_float32_matmul_precision() == "highest" else " with TF32 products"
    gpu = torch.cuda.get_device_name() + rounds if torch.cuda.is_available() else None
    # Cores that this process may use, which may be fewer than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"cpu": _cpu_model(), "cores": cores, "gpu": gpu}


@cache
def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: *(.*)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    # Optional locks off: reading a commit must not disturb a git command that runs beside us.
    how: Any = {"env": {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}, "capture_output": True, "text": True, "timeout": 10}
    try:
        answer = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, **how)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
