"""What the report knows of a run, and the parts of receipts and measurements that it reads.

Anybody may have written a receipt: the pydantic models take exactly what is declared and refuse the rest.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, model_validator

from trisect.bench.rows import Case
from trisect.plan.budget import PREFILL_LENGTH, budget_of
from trisect.records.shapes import ModelShape

BEFORE, AFTER = "before", "after"
SUMS = ("compress",)  # timings that are the sum of the others

Count = Annotated[int, Field(ge=0, lt=1 << 31)]


class Kind(StrEnum):
    """Of quantities."""

    SIZE = "size"
    PERPLEXITY = "perplexity"
    TASK = "task"
    SPEED = "speed"
    LATENCY = "latency"


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What is measured. Two runs can be compared where theirs are equal."""

    kind: Kind
    name: str
    detail: str = ""  # what it was measured on
    key: str = ""  # tells apart what has the same name, e.g. the hash of a text's tokens.
    unit: str = ""


BITS = Quantity(kind=Kind.SIZE, name="bits per dense parameter", detail="weight files over parameters before")
PARAMETERS = Quantity(kind=Kind.SIZE, name="parameters", detail="embeddings included")
LINEAR = Quantity(kind=Kind.SIZE, name="decoder linear weights")
KV_CACHE = Quantity(kind=Kind.SIZE, name="KV cache per token", detail="at the same precision", unit="B")
FLOPS = Quantity(kind=Kind.SIZE, name="FLOPs", detail=f"a prefill of {PREFILL_LENGTH} tokens, decoder layers")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One number about one model."""

    model: str  # as it was typed
    quantity: Quantity
    value: float
    side: str | None = None  # `BEFORE` or `AFTER` where the file itself says so; else the model's name decides
    error: float | None = None  # its standard error, where the file says it


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A quantity before and after compression; None where nobody measured it."""

    quantity: Quantity
    before: float | None = None
    after: float | None = None
    error: float | None = None  # standard error of the difference, where it is known


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


class Trial(Entry):
    """One try of a search for the smallest model within a bound."""

    ratio: float
    rise: float
    inside: bool = False


class Perplexity(Entry):
    """Perplexity of one model on one text."""

    perplexity: float | None
    data: str
    token_hash: str
    windows: Any = None
    length: Any = None

    def reading(self, model: str = "", side: str | None = None) -> Reading:
        """The number; JSON has no infinity, so a perplexity beyond every float is null."""
        size = "" if self.windows is None else f"{self.windows} windows of {self.length} tokens"
        name = f"perplexity, {Path(self.data).name}"
        quantity = Quantity(kind=Kind.PERPLEXITY, name=name, detail=size, key=self.token_hash)
        value = math.inf if self.perplexity is None else self.perplexity
        return Reading(model=model, quantity=quantity, value=value, side=side)


class Sides(Entry):
    """Perplexity before and after something was done to a model."""

    before: Perplexity | None = None
    after: Perplexity | None = None

    def readings(self, **models: str) -> list[Reading]:
        """Those of the sides that are named, with their models, e.g. before="smollm2-135m"."""
        found = ((getattr(self, side), model, side) for side, model in models.items())
        return [entry.reading(model, side) for entry, model, side in found if entry is not None]


class Record(Entry):
    """A whole record of trisect: null means that there is nothing."""

    perplexity: float | Sides | None = None  # of the only text
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
    trials: list[Trial] = Field([], validation_alias=AliasPath("target", "trials"))
    """Of the search for a bound on perplexity."""
    plan: dict[str, Any] | None = None
    losses: list[Loss] = []
    tuning: list[Tuning] = []
    source: Any = None
    source_bytes: Annotated[int, Field(gt=0)] | None = None  # of the weight files of the model that it was made from
    made_from: Any = None
    whole: dict[str, Any]  # as it was written


class Score(Entry):
    """A model's score in one task."""

    metric: str
    value: float
    stderr: float | None = None
    shots: Any = None
    questions: Any = None


class Tasks(Entry):
    """Scores by task, and their mean."""

    scores: dict[str, Score]
    average: float
    average_stderr: float | None = None

    def readings(self, model: str) -> Iterator[Reading]:
        """Every score, and the average of several."""
        asked = []
        for name, score in self.scores.items():
            detail = f"{score.metric.removesuffix(',none')}, {score.shots} shots, {score.questions} questions"
            asked.append(f"{name} ({detail})")
            quantity = Quantity(kind=Kind.TASK, name=name, detail=detail)
            yield Reading(model=model, quantity=quantity, value=score.value, error=score.stderr)
        if len(asked) > 1:
            # Averages compare where the same questions were asked.
            quantity = Quantity(kind=Kind.TASK, name=f"average of {len(asked)} tasks", key="; ".join(asked))
            yield Reading(model=model, quantity=quantity, value=self.average, error=self.average_stderr)


class BenchRow(Entry):
    """One row of `trisect bench`: its times, or why there are none."""

    case: Annotated[Case, BeforeValidator(TypeAdapter(Case).validate_python)]
    error: Any = None
    times: dict[str, float] = {}
    tokens_per_second: float = 0.0

    @model_validator(mode="after")
    def _times_or_an_error(self) -> Self:
        if self.error is None and ("p50" not in self.times or not self.tokens_per_second):
            raise ValueError("a row of bench has times with a p50 and tokens_per_second, or an error")
        return self

    def readings(self) -> Iterator[Reading]:
        """Of dense and compressed rows of a checkpoint; rows at other widths are about no run."""
        case = self.case
        side = {("dense", ""): BEFORE, ("trisect", "checkpoint"): AFTER}.get((case.kind, case.asked))
        if side is None or self.error is not None:
            return
        name = f"{case.phase}, {case.size} tokens"
        how = f"{case.attention}, {case.mode}, {case.dtype}, {case.device}; the dense model with random weights"
        speed = Quantity(kind=Kind.SPEED, name=name, detail=how, unit="tokens/s")
        latency = replace(speed, kind=Kind.LATENCY, unit="ms")
        for quantity, value in ((speed, self.tokens_per_second), (latency, 1000 * self.times["p50"])):
            yield Reading(model=case.subject, quantity=quantity, value=value, side=side)


class Measurement(Record):
    """What `--json` of compress, eval, quantize or bench wrote."""

    out: Any = None
    tasks: Tasks | None = None
    rows: list[BenchRow] = []


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, as far as the report can know it."""

    name: str  # for people; no two runs of a report share one
    folder: Path
    source: str | None  # the model it was made from, as it was typed
    method: str
    before: ModelShape
    after: ModelShape
    weight_bytes: int  # of the weight files
    receipts: tuple[Receipt, ...]  # the folder's own, then those of the models it was made from
    facts: tuple[Fact, ...] = ()

    def fact(self, quantity: Quantity) -> Fact:
        """What is known of a quantity, perhaps nothing."""
        return next((fact for fact in self.facts if fact.quantity == quantity), Fact(quantity=quantity))

    @property
    def source_name(self) -> str:
        """The model it was made from, for people: the last part of its path."""
        return Path(self.source).name if self.source else "the dense model"

    @property
    def compression(self) -> Receipt:
        """The receipt of the compression itself: quantising puts its own on top."""
        return next((receipt for receipt in self.receipts if receipt.plan is not None), self.receipts[0])

    @property
    def tunings(self) -> list[Tuning]:
        return [tuning for receipt in self.receipts for tuning in receipt.tuning]

    @property
    def timings(self) -> dict[str, float]:
        """Seconds by stage, of everything that was done to the model; nothing is counted twice."""
        seconds: dict[str, float] = {}
        for timings in (record.timings for receipt in self.receipts for record in (receipt, *receipt.tuning)):
            for stage, spent in timings.items():
                if stage not in SUMS or len(timings) == 1:
                    seconds[stage] = seconds.get(stage, 0.0) + spent
        return seconds

    def with_facts(self, readings: Iterable[Reading]) -> Self:
        """The run with its sizes and with readings whose side is known; later ones win."""
        sides: dict[Quantity, dict[str, Reading]] = {}
        for reading in readings:
            sides.setdefault(reading.quantity, {})[str(reading.side)] = reading
        measured = []
        for quantity, both in sides.items():
            was, now = (both[side].value if side in both else None for side in (BEFORE, AFTER))
            errors = [reading.error for reading in both.values() if reading.error is not None]
            error = math.hypot(*errors) if len(errors) == 2 else None
            measured.append(Fact(quantity=quantity, before=was, after=now, error=error))
        return replace(self, facts=(*self._size_facts(), *measured))

    def _size_facts(self) -> Iterator[Fact]:
        """What needs no measuring."""
        old, new, width = budget_of(self.before), budget_of(self.after), self.before.bytes_per_element
        files = next((receipt.source_bytes for receipt in reversed(self.receipts) if receipt.source_bytes), None)
        detail = "the files" if files else f"before: {width} per parameter; after: the files"
        weights = Quantity(kind=Kind.SIZE, name="weights in bytes", detail=detail, unit="B")
        held = files or old.parameters * width, self.weight_bytes
        yield Fact(quantity=PARAMETERS, before=old.parameters, after=new.parameters)
        yield Fact(quantity=LINEAR, before=old.linear_parameters, after=new.linear_parameters)
        yield Fact(quantity=weights, before=held[0], after=held[1])
        yield Fact(quantity=BITS, before=8 * held[0] / old.parameters, after=8 * held[1] / old.parameters)
        yield Fact(quantity=KV_CACHE, before=old.kv_bytes_per_token, after=new.kv_bytes_per_token)
        yield Fact(quantity=FLOPS, before=old.flops, after=new.flops)
