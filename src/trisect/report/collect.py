"""Read runs from their folders, and match measurements to the models they are about."""

import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from trisect.errors import TrisectError
from trisect.plan.budget import PREFILL_LENGTH, budget_of
from trisect.report.records import (
    AFTER,
    BEFORE,
    BenchRow,
    Entry,
    Fact,
    Kind,
    Measurement,
    Perplexity,
    Quantity,
    Reading,
    Receipt,
    Run,
    Tasks,
)
from trisect.support.checks import read_json, shown

MEASUREMENTS = "measurements"
"""A run's subfolder whose JSON files belong to it."""
LONGEST_CHAIN = 8
"""Receipts inside one another: compressed, then quantised, perhaps more than once."""
BITS = Quantity(kind=Kind.SIZE, name="bits per dense parameter", detail="weight files over parameters before")
PARAMETERS = Quantity(kind=Kind.SIZE, name="parameters", detail="embeddings included")
KV_CACHE = Quantity(kind=Kind.SIZE, name="KV cache per token", detail="at the same precision", unit="B")
FLOPS = Quantity(kind=Kind.SIZE, name="FLOPs", detail=f"a prefill of {PREFILL_LENGTH} tokens, decoder layers")

EntryType = TypeVar("EntryType", bound=Entry)


def read_runs(folders: Sequence[Path], measured: Sequence[Path] = ()) -> list[Run]:
    """All runs, in the order given, with every measurement in its place."""
    runs = [_read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    readings = {run.name: list(_receipt_readings(run.receipts)) for run in runs}
    own = {path: run for run in runs for path in sorted((run.folder / MEASUREMENTS).glob("*.json"))}
    for path in dict.fromkeys((*own, *measured)):
        for name, about in _by_run(read_measurement(path), runs, path, owner=own.get(path)).items():
            readings[name] += about
    # A dense model that several runs were made from was measured for all of them; speeds only beside each.
    dense = [
        (run.source, reading)
        for run in runs
        for reading in readings[run.name]
        if reading.side == BEFORE and reading.quantity.kind not in (Kind.SPEED, Kind.LATENCY)
    ]
    for run in runs:
        known = {reading.quantity for reading in readings[run.name] if reading.side == BEFORE}
        same = [reading for source, reading in dense if source is not None and source == run.source]
        readings[run.name] += [reading for reading in same if reading.quantity not in known]
    return [with_facts(run, readings[run.name]) for run in runs]


def read_receipts(folder: Path) -> tuple[Receipt, ...]:
    """A folder's receipt, then those of the models it was made from, the newest first."""
    path = folder / "receipt.json"
    if not path.is_file():
        raise TrisectError(
            f"{folder} has no receipt.json, so nothing is known of how it was made; give a folder as "
            "`trisect compress -o` wrote it."
        )
    found: list[Receipt] = []
    entry: Any = read_json(path)
    while isinstance(entry, dict) and len(found) < LONGEST_CHAIN:
        found.append(_checked(Receipt, {**entry, "whole": entry}, path))
        entry = entry.get("made_from")
    if not found:
        raise TrisectError(f"{path} is no receipt of trisect: it is {shown(entry)}.")
    return tuple(found)


def read_measurement(path: Path) -> list[Reading]:
    """All numbers of one file; an error says so where it holds none."""
    data = read_json(path)
    entry = _checked(Measurement, data, path)
    found = [*_speeds(entry.rows)]
    if isinstance(entry.model, str):
        if isinstance(entry.out, str):  # compress and quantize: the model that was read, and what was written
            both = [row.readings(before=entry.model, after=entry.out) for row in entry.texts]
            found += [replace(reading, side=None) for row in both for reading in row]
        elif isinstance(entry.perplexity, float):
            found.append(_checked(Perplexity, data, path).reading(entry.model))
        if entry.tasks is not None:
            found += _scores(entry.tasks, model=entry.model)
    if not found:
        raise TrisectError(
            f"{path} holds no measurement; give what --json of `trisect eval`, compress, quantize or bench wrote."
        )
    return found


def with_facts(run: Run, readings: Iterable[Reading]) -> Run:
    """The run with its sizes and with readings whose side is known; later ones win."""
    sides: dict[Quantity, dict[str, Reading]] = {}
    for reading in readings:
        assert reading.side in (BEFORE, AFTER)
        sides.setdefault(reading.quantity, {})[str(reading.side)] = reading
    measured = []
    for quantity, both in sides.items():
        was, now = (both[side].value if side in both else None for side in (BEFORE, AFTER))
        errors = [reading.error for reading in both.values() if reading.error is not None]
        error = math.hypot(*errors) if len(errors) == 2 else None
        measured.append(Fact(quantity=quantity, before=was, after=now, error=error))
    return replace(run, facts=(*_size_facts(run), *measured))


def _size_facts(run: Run) -> Iterator[Fact]:
    """What needs no measuring."""
    old, new = budget_of(run.before), budget_of(run.after)
    width = run.before.bytes_per_element
    detail = f"before: {width} per parameter; after: the files"
    weights = Quantity(kind=Kind.SIZE, name="weights in bytes", detail=detail, unit="B")
    pairs = {
        PARAMETERS: (old.parameters, new.parameters),
        Quantity(kind=Kind.SIZE, name="decoder linear weights"): (old.linear_parameters, new.linear_parameters),
        weights: (old.parameters * width, run.weight_bytes),
        BITS: (8 * width, 8 * run.weight_bytes / old.parameters),
        KV_CACHE: (old.kv_bytes_per_token, new.kv_bytes_per_token),
        FLOPS: (old.flops, new.flops),
    }
    for quantity, (was, now) in pairs.items():
        yield Fact(quantity=quantity, before=was, after=now)


def _read_run(folder: Path, name: str) -> Run:
    from trisect.models import read_shape

    entry = _config_entry(folder)
    receipts = read_receipts(folder)
    after, before, _ = read_shape(str(folder))
    return Run(
        name=name,
        folder=folder,
        source=_source_of(receipts),
        method=str(entry.get("method")),
        before=before,
        after=after,
        weight_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        receipts=receipts,
    )


def _config_entry(folder: Path) -> dict[str, Any]:
    """The `trisect` entry of a folder's config; its details are checked by whoever builds the model."""
    advice = "give a folder that `trisect compress -o` wrote"
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise TrisectError(f"{folder} {what}; {advice}.")
    if not (folder / "config.json").is_file():
        raise TrisectError(f"{folder} is no run: it has no config.json; {advice}.")
    config = read_json(folder / "config.json")
    entry = config.get("trisect") if isinstance(config, dict) else None
    if not isinstance(entry, dict):
        raise TrisectError(f"{folder} is no run: its config.json has no `trisect` entry; {advice}.")
    return entry


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, with as much of what is above them as tells them apart."""
    paths = [folder.resolve() for folder in folders]
    doubled = [path for path in paths if paths.count(path) > 1]
    if doubled:
        raise TrisectError(f"The run {doubled[0].name} was given twice; give every folder once.")
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("two different paths have the same parts")


def _source_of(receipts: Iterable[Receipt]) -> str | None:
    """The dense model, as it was typed when it was compressed."""
    for receipt in receipts:
        for name in (receipt.source, receipt.model, receipt.recipe.get("model")):
            if isinstance(name, str) and receipt.made_from is None:
                return name
    return None


def _checked(model: type[EntryType], data: Any, path: Path) -> EntryType:
    """The entry that a file holds, or one line about the first thing in it that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        wrong = error.errors()[0]
        place = ".".join(map(str, wrong["loc"])) or "the file"
        reason = wrong["msg"].removeprefix("Value error, ").replace("Input should", "it should")
        reason = re.sub(r"dictionary or instance of \w+", "mapping", reason)
        what = "receipt" if model is Receipt else "measurement"
        raise TrisectError(
            f"{path} is no {what} of trisect: {shown(place)} has {shown(wrong['input'])}; {reason}."
        ) from error


def _receipt_readings(receipts: tuple[Receipt, ...]) -> Iterator[Reading]:
    """What a run's receipts say of the dense model and of the run itself, not of what lay between."""
    for depth, receipt in enumerate(receipts):
        # Once tuned or quantised, it is no longer the model that was measured after compressing.
        final = depth == 0 and not receipt.tuning
        for row in receipt.texts:
            yield from row.readings(before="", after="") if final else row.readings(before="")
    for row in receipts[0].tuning[-1].held_out if receipts[0].tuning else ():
        yield from row.readings(after="")


def _scores(tasks: Tasks, *, model: str) -> Iterator[Reading]:
    asked = []
    for name, score in tasks.scores.items():
        metric = score.metric.removesuffix(",none")
        detail = f"{metric}, {score.shots} shots, {score.questions} questions"
        asked.append(f"{name} ({detail})")
        quantity = Quantity(kind=Kind.TASK, name=name, detail=detail)
        yield Reading(model=model, quantity=quantity, value=score.value, error=score.stderr)
    if len(asked) > 1:
        # Averages compare where the same questions were asked.
        quantity = Quantity(kind=Kind.TASK, name=f"average of {len(asked)} tasks", key="; ".join(asked))
        yield Reading(model=model, quantity=quantity, value=tasks.average, error=tasks.average_stderr)


def _speeds(rows: Iterable[BenchRow]) -> Iterator[Reading]:
    """Dense and compressed rows of a checkpoint; rows at other widths are about no run."""
    for row in rows:
        case = row.case
        side = {("dense", ""): BEFORE, ("trisect", "checkpoint"): AFTER}.get((case.kind, case.asked))
        if side is None or row.error is not None:
            continue
        name = f"{case.phase}, {case.batch} x {case.length}" + (f" + {case.new}" if case.new else "") + " tokens"
        how = f"{case.attention}, {case.mode}, {case.dtype}, {case.device}; random weights of the same shape"
        speed = Quantity(kind=Kind.SPEED, name=name, detail=how, unit="tokens/s")
        latency = replace(speed, kind=Kind.LATENCY, unit="ms")
        for quantity, value in ((speed, row.tokens_per_second), (latency, 1000 * row.times["p50"])):
            yield Reading(model=case.subject, quantity=quantity, value=value, side=side)


def _by_run(
    readings: Sequence[Reading], runs: Sequence[Run], path: Path, *, owner: Run | None
) -> dict[str, list[Reading]]:
    """Run's name -> the readings about it, or about the model it came from.

    What is about nobody else is about the `owner`, whose folder the file lies in and may have been renamed.
    """
    found: dict[str, list[Reading]] = {run.name: [] for run in runs}
    for reading in readings:
        others = [] if owner is None else [(owner, AFTER)]
        for run, side in _about(reading.model, runs) or others:
            if side != BEFORE or reading.side != AFTER:
                found[run.name].append(replace(reading, side=reading.side or side))
    if not any(found.values()):
        models = ", ".join(sorted({shown(reading.model) for reading in readings}))
        names = ", ".join(run.name for run in runs)
        raise TrisectError(
            f"{path} is about {models}, which is neither a run given ({names}) nor what one was made from."
        )
    return found


def _about(model: str, runs: Sequence[Run]) -> list[tuple[Run, str]]:
    """The runs that a model's name means, and on which side; a folder that was moved is known by its name."""
    for known in (os.path.realpath, os.path.basename):
        after = [(run, AFTER) for run in runs if known(_clean(model)) == known(str(run.folder))]
        before = [(run, BEFORE) for run in runs if known(_clean(model)) == known(_clean(run.source or "\n"))]
        if after or before:
            return after or before
    return []


def _clean(name: str) -> str:
    """A name without what no path can hold."""
    return name.replace("\0", "").rstrip("/")
