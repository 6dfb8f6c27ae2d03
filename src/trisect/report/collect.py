"""Read runs from their folders, and match measurements to the models they are about."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.report.records import AFTER, BEFORE, Kind, Measurement, Perplexity, Reading, Receipt, Run
from trisect.support.checks import read_json, shown, validated

MEASUREMENTS = "measurements"
"""A run's subfolder whose JSON files belong to it."""
LONGEST_CHAIN = 8
"""Receipts inside one another: compressed, then quantised, perhaps more than once."""


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
    return [run.with_facts(readings[run.name]) for run in runs]


def read_measurement(path: Path) -> list[Reading]:
    """All numbers of one file; an error says so where it holds none."""
    data = read_json(path)
    where = f"{path} is no measurement of trisect"
    entry = validated(Measurement, data, where=where)
    found = [reading for row in entry.rows for reading in row.readings()]
    if isinstance(entry.model, str):
        if isinstance(entry.out, str):  # compress and quantize: the model that was read, and what was written
            both = [row.readings(before=entry.model, after=entry.out) for row in entry.texts]
            found += [replace(reading, side=None) for row in both for reading in row]
        elif isinstance(entry.perplexity, float):
            found.append(validated(Perplexity, data, where=where).reading(entry.model))
        if entry.tasks is not None:
            found += entry.tasks.readings(entry.model)
    if not found:
        raise TrisectError(
            f"{path} holds no measurement; give what --json of `trisect eval`, compress, quantize or bench wrote."
        )
    return found


def _read_run(folder: Path, name: str) -> Run:
    from trisect.models import read_shape

    method = _method_of(folder)
    receipts = _receipts(folder)
    after, before, _ = read_shape(str(folder))
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    shapes: Any = {"before": before, "after": after, "weight_bytes": size}
    return Run(name=name, folder=folder, source=_source_of(receipts), method=method, receipts=receipts, **shapes)


def _method_of(folder: Path) -> str:
    """From the `trisect` entry of a folder's config; its details are checked by whoever builds the model."""
    path, problem = folder / "config.json", ""
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
    elif not path.is_file():
        problem = "is no run: it has no config.json"
    config = None if problem else read_json(path)
    entry = config.get("trisect") if isinstance(config, dict) else None
    if not isinstance(entry, dict):
        problem = problem or "is no run: its config.json has no `trisect` entry"
        raise TrisectError(f"{folder} {problem}; give a folder that `trisect compress -o` wrote.")
    return str(entry.get("method"))


def _receipts(folder: Path) -> tuple[Receipt, ...]:
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
        found.append(validated(Receipt, {**entry, "whole": entry}, where=f"{path} is no receipt of trisect"))
        entry = entry.get("made_from")
    if not found:
        raise TrisectError(f"{path} is no receipt of trisect: it is {shown(entry)}.")
    return tuple(found)


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, with as much of what is above them as tells them apart."""
    paths = [folder.resolve() for folder in folders]
    doubled = [path for path in paths if paths.count(path) > 1]
    if doubled:
        raise TrisectError(f"The run {doubled[0].name} was given twice; give every folder once.")
    depth, names = 0, [""] * len(paths)
    while len(set(names)) < len(names) or depth == 0:
        depth += 1
        names = ["/".join(path.parts[-depth:]) for path in paths]
    return names


def _source_of(receipts: Iterable[Receipt]) -> str | None:
    """The dense model, as it was typed when it was compressed."""
    first = [receipt for receipt in receipts if receipt.made_from is None]
    names = (name for receipt in first for name in (receipt.source, receipt.model, receipt.recipe.get("model")))
    return next((name for name in names if isinstance(name, str)), None)


def _receipt_readings(receipts: tuple[Receipt, ...]) -> Iterator[Reading]:
    """What a run's receipts say of the dense model and of the run itself, not of what lay between."""
    for depth, receipt in enumerate(receipts):
        # Once tuned or quantised, it is no longer the model that was measured after compressing.
        final = depth == 0 and not receipt.tuning
        for row in receipt.texts:
            yield from row.readings(before="", after="") if final else row.readings(before="")
    for row in receipts[0].tuning[-1].held_out if receipts[0].tuning else ():
        yield from row.readings(after="")


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
