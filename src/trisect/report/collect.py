"""Read runs from their folders, and match measurements to the models they are about."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.report.records import AFTER, BEFORE, Kind, Measurement, Perplexity, Reading, Receipt, Run
from trisect.support.checks import read_json, shown, validated

MEASUREMENTS = "measurements"  # a run's subfolder whose JSON files belong to it
LONGEST_CHAIN = 8  # receipts inside one another: compressed, then quantised, perhaps more than once


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
        wanted = "give what --json of `trisect eval`, compress, quantize or bench wrote"
        raise TrisectError(f"{path} holds no measurement; {wanted}.")
    return found


def _read_run(folder: Path, name: str) -> Run:
    from trisect.models import read_shape

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
    made = next(((r.source, r.model, r.recipe.get("model")) for r in receipts if r.made_from is None), ())
    source = next((name for name in made if isinstance(name, str)), None)
    after, before, _ = read_shape(str(folder))
    about: Any = {"source": source, "method": str(entry.get("method")), "receipts": receipts}
    about["weight_bytes"] = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return Run(name=name, folder=folder, before=before, after=after, **about)


def _receipts(folder: Path) -> tuple[Receipt, ...]:
    """A folder's receipt, then those of the models it was made from, the newest first."""
    path = folder / "receipt.json"
    if not path.is_file():
        unknown = f"{folder} has no receipt.json, so nothing is known of how it was made"
        raise TrisectError(f"{unknown}; give a folder as `trisect compress -o` wrote it.")
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
            yield from row.readings(before="", after="") if final else row.readings(before="")
    for row in receipts[0].tuning[-1].held_out if receipts[0].tuning else ():
        yield from row.readings(after="")


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
