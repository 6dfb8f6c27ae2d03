"""Read runs from their folders: config, receipts, sizes, and the measurements that belong to them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.report.facts import assigned, with_facts
from trisect.report.readings import read_measurement, readings_of_receipts
from trisect.report.receipts import losses_of, read_receipts, source_of, timings_of, trials_of
from trisect.report.records import Run
from trisect.support.checks import read_json

MEASUREMENTS = "measurements"
"""A run's subfolder whose JSON files belong to it."""


def read_runs(folders: Sequence[Path], measured: Sequence[Path] = ()) -> list[Run]:
    """All runs, in the order given, with every measurement in its place."""
    runs = [_read_run(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    readings = {run.name: readings_of_receipts(run.receipts, run.folder / "receipt.json") for run in runs}
    own = {path: run for run in runs for path in sorted((run.folder / MEASUREMENTS).glob("*.json"))}
    for path in dict.fromkeys((*own, *measured)):
        found = assigned(read_measurement(path), runs, str(path), owner=own.get(path))
        for name, about in found.items():
            readings[name] += about
    return [with_facts(run, readings[run.name]) for run in runs]


def _read_run(folder: Path, name: str) -> Run:
    entry = _entry(folder)
    from trisect.models import read_shape

    receipts = read_receipts(folder)
    after, before, _ = read_shape(str(folder))
    path = folder / "receipt.json"
    compression = next((receipt for receipt in receipts if "plan" in receipt), receipts[0])
    return Run(
        name=name,
        folder=folder,
        source=source_of(receipts),
        method=str(entry.get("method")),
        ratio=float(entry.get("ratio") or 0.0),
        before=before,
        after=after,
        weight_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        receipts=receipts,
        losses=losses_of(compression, path),
        trials=trials_of(compression, path),
        timings=timings_of(receipts, path),
    )


def _entry(folder: Path) -> dict[str, Any]:
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
