"""Runs, read from their folders, with the measurements that are about them."""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, TypeAdapter, model_validator

from trisect.bench.rows import Case
from trisect.bundle import source_of, weights_size
from trisect.errors import TrisectError
from trisect.models import read_shape
from trisect.plan.budget import PREFILL_LENGTH, budget_of
from trisect.records.shapes import ModelShape
from trisect.support.checks import read_json, shown, validated
from trisect.support.receipt import Entry, Perplexity, Receipt, Record, Sides, Tuning, receipt_of

BEFORE, AFTER = "before", "after"
MEASUREMENTS = "measurements"  # a run's subfolder whose JSON files belong to it
LONGEST_CHAIN = 8  # receipts inside one another: compressed, then quantised, perhaps more than once
SUMS = ("compress",)  # timings that are the sum of the others

SIZE, PERPLEXITY, TASK, SPEED = "size", "perplexity", "task", "speed"  # kinds of quantities


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What is measured. Two runs can be compared where theirs are equal."""

    kind: str
    name: str
    detail: str = ""  # what it was measured on
    key: str = ""  # tells apart what has the same name, e.g. the hash of a text's tokens.
    unit: str = ""


BITS = Quantity(kind=SIZE, name="bits per dense parameter", detail="weight files over parameters before")
PARAMETERS = Quantity(kind=SIZE, name="parameters", detail="embeddings included")
LINEAR = Quantity(kind=SIZE, name="decoder linear weights")
KV_CACHE = Quantity(kind=SIZE, name="KV cache per token", detail="at the same precision", unit="B")
FLOPS = Quantity(kind=SIZE, name="FLOPs", detail=f"a prefill of {PREFILL_LENGTH} tokens, decoder layers")
LEADING_SIZES = (PARAMETERS, KV_CACHE, FLOPS)


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


def readings_of(row: Sides, **models: str) -> Iterator[Reading]:
    """Perplexities of the sides that are named, with their models, e.g. before="smollm2-135m"."""
    for side, model in models.items():
        if (entry := getattr(row, side)) is not None:
            name = f"perplexity, {entry.name}"
            quantity = Quantity(kind=PERPLEXITY, name=name, detail=entry.size, key=entry.token_hash)
            yield Reading(model=model, quantity=quantity, value=entry.value, side=side)


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
            quantity = Quantity(kind=TASK, name=name, detail=detail)
            yield Reading(model=model, quantity=quantity, value=score.value, error=score.stderr)
        if len(asked) > 1:
            # Averages compare where the same questions were asked.
            quantity = Quantity(kind=TASK, name=f"average of {len(asked)} tasks", key="; ".join(asked))
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
        speed = Quantity(kind=SPEED, name=name, detail=how, unit="tokens/s")
        yield Reading(model=case.subject, quantity=speed, value=self.tokens_per_second, side=side)


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
        weights = Quantity(kind=SIZE, name="weights in bytes", detail=detail, unit="B")
        held = files or old.parameters * width, self.weight_bytes
        yield Fact(quantity=PARAMETERS, before=old.parameters, after=new.parameters)
        yield Fact(quantity=LINEAR, before=old.linear_parameters, after=new.linear_parameters)
        yield Fact(quantity=weights, before=held[0], after=held[1])
        yield Fact(quantity=BITS, before=8 * held[0] / old.parameters, after=8 * held[1] / old.parameters)
        yield Fact(quantity=KV_CACHE, before=old.kv_bytes_per_token, after=new.kv_bytes_per_token)
        yield Fact(quantity=FLOPS, before=old.flops, after=new.flops)


def read_runs(folders: Sequence[Path], measured: Sequence[Path] = ()) -> list[Run]:
    """All runs, in the order given, with every measurement in its place."""
    runs = [_read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    readings = {run.name: list(_receipt_readings(run.receipts)) for run in runs}
    own = {path: run for run in runs for path in sorted((run.folder / MEASUREMENTS).glob("*.json"))}
    for path in dict.fromkeys((*own, *measured)):
        for name, about in _by_run(read_measurement(path), runs, path, owner=own.get(path)).items():
            readings[name] += about
    # A dense model that several runs were made from was measured for all of them; speeds only beside each.
    dense = {run.name: [entry for entry in readings[run.name] if entry.side == BEFORE] for run in runs}
    for run in runs:
        known = {reading.quantity for reading in dense[run.name]}
        kin = [other.name for other in runs if run.source is not None and other.source == run.source]
        shared = [reading for name in kin for reading in dense[name] if reading.quantity.kind != SPEED]
        readings[run.name] += [reading for reading in shared if reading.quantity not in known]
    return [run.with_facts(readings[run.name]) for run in runs]


def read_measurement(path: Path) -> list[Reading]:
    """All numbers of one file; an error says so where it holds none."""
    data = read_json(path)
    where = f"{path} is no measurement of trisect"
    entry = validated(Measurement, data, where=where)
    found = [reading for row in entry.rows for reading in row.readings()]
    if isinstance(entry.model, str):
        rows, out = entry.texts if entry.out else [], str(entry.out or entry.model)
        if isinstance(entry.perplexity, float):  # of eval: one model; compress and quantize wrote another, `out`
            rows = [Sides(after=validated(Perplexity, data, where=where))]
        both = [reading for row in rows for reading in readings_of(row, before=entry.model, after=out)]
        found += [replace(reading, side=None) for reading in both]
        if entry.tasks is not None:
            found += entry.tasks.readings(entry.model)
    if not found:
        wanted = "give what --json of `trisect eval`, compress, quantize or bench wrote"
        raise TrisectError(f"{path} holds no measurement; {wanted}.")
    return found


def _read_run(folder: Path, name: str) -> Run:
    path, wanted = folder / "config.json", "give a folder that `trisect compress -o` wrote"
    if not path.is_file():
        problem = "is a file" if folder.is_file() else "has no config.json" if folder.is_dir() else "does not exist"
        raise TrisectError(f"{folder} {problem}; {wanted}.")
    config = read_json(path)  # its details are checked by whoever builds the model
    entry = config.get("trisect") if isinstance(config, dict) else None
    if not isinstance(entry, dict):
        raise TrisectError(f"{folder} is no run: its config.json has no `trisect` entry; {wanted}.")
    receipts = _receipts(folder)
    # The dense model, as it was typed when it was compressed.
    source = next((source_of(receipt.whole) for receipt in receipts if receipt.made_from is None), None)
    after, before, _ = read_shape(str(folder))
    about: Any = {"source": source, "method": str(entry.get("method")), "receipts": receipts}
    return Run(name=name, folder=folder, before=before, after=after, weight_bytes=weights_size(folder), **about)


def _receipts(folder: Path) -> tuple[Receipt, ...]:
    """A folder's receipt, then those of the models it was made from, the newest first."""
    path = folder / "receipt.json"
    if not path.is_file():
        raise TrisectError(f"{folder} has no receipt.json; give a folder as `trisect compress -o` wrote it.")
    found = [receipt_of(read_json(path), path)]
    while isinstance(found[-1].made_from, dict) and len(found) < LONGEST_CHAIN:
        found.append(receipt_of(found[-1].made_from, path))
    return tuple(found)


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, with as much of what is above them as tells them apart."""
    paths = [folder.resolve() for folder in folders]
    doubled = [path for path in paths if paths.count(path) > 1]
    if doubled:
        raise TrisectError(f"The run {doubled[0].name} was given twice; give every folder once.")
    names = [path.name for path in paths]
    if len(set(names)) == len(names):
        return names
    above = os.path.commonpath([path.parent for path in paths])
    return [path.relative_to(above).as_posix() for path in paths]


def _receipt_readings(receipts: tuple[Receipt, ...]) -> Iterator[Reading]:
    """What a run's receipts say of the dense model and of the run itself, not of what lay between."""
    for depth, receipt in enumerate(receipts):
        # Once tuned or quantised, it is no longer the model that was measured after compressing.
        final = depth == 0 and not receipt.tuning
        for row in receipt.texts:
            yield from readings_of(row, before="", after="") if final else readings_of(row, before="")
    for row in receipts[0].tuning[-1].held_out if receipts[0].tuning else ():
        yield from readings_of(row, after="")


def _by_run(
    readings: Sequence[Reading], runs: Sequence[Run], path: Path, *, owner: Run | None
) -> dict[str, list[Reading]]:
    """Run's name -> the readings about it, or about the model it came from."""
    # What is about nobody else is about the `owner`, whose folder the file lies in and may have been renamed.
    found: dict[str, list[Reading]] = {run.name: [] for run in runs}
    for reading in readings:
        others = [] if owner is None else [(owner, AFTER)]
        for run, side in _about(reading.model, runs) or others:
            if side != BEFORE or reading.side != AFTER:
                found[run.name].append(replace(reading, side=reading.side or side))
    if not any(found.values()):
        models = ", ".join(sorted({shown(reading.model) for reading in readings}))
        neither = f"neither a run given ({', '.join(found)}) nor what one was made from"
        raise TrisectError(f"{path} is about {models}, which is {neither}.")
    return found


def _about(model: str, runs: Sequence[Run]) -> list[tuple[Run, str]]:
    """The runs that a model's name means, and on which side; a folder that was moved is known by its name."""
    for known in (os.path.realpath, os.path.basename):

        def place(name: str, known: Any = known) -> str:
            return str(known(name.replace("\0", "").rstrip("/")))  # no path can hold the former

        after = [(run, AFTER) for run in runs if place(model) == place(str(run.folder))]
        before = [(run, BEFORE) for run in runs if place(model) == place(run.source or "\n")]
        if after or before:
            return after or before
    return []
