"""Receipts as the report needs them. Anybody may have written one: every part is checked when it is read."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.records.parts import Spectrum
from trisect.report.records import Loss, Trial
from trisect.support.checks import read_json, shown

KINDS = {
    **dict.fromkeys(("recipe", "timings", "versions", "hardware", "perplexity", "target", "plan"), dict),
    **dict.fromkeys(("losses", "tuning"), list),
}
LONGEST_CHAIN = 8
"""Receipts inside one another: compressed, then quantised, perhaps more than once."""
LAYERS = 10_000
LONGEST_SPECTRUM = 1000
SUMS = ("compress",)
"""Timings that are the sum of the others."""


def read_receipts(folder: Path) -> tuple[dict[str, Any], ...]:
    """A folder's receipt, then those of the models it was made from, the newest first."""
    path = folder / "receipt.json"
    if not path.is_file():
        raise TrisectError(
            f"{folder} has no receipt.json, so nothing is known of how it was made; give a folder as "
            "`trisect compress -o` wrote it."
        )
    found: list[dict[str, Any]] = []
    entry: Any = read_json(path)
    while isinstance(entry, dict) and len(found) < LONGEST_CHAIN:
        found.append(_checked(entry, path))
        entry = entry.get("made_from")
    if not found:
        raise TrisectError(f"{path} is no receipt of trisect: it is {shown(entry)}.")
    return tuple(found)


def source_of(receipts: Iterable[dict[str, Any]]) -> str | None:
    """The dense model, as it was typed when it was compressed."""
    for receipt in receipts:
        recipe = receipt.get("recipe") or {}
        for name in (receipt.get("source"), receipt.get("model"), recipe.get("model")):
            if isinstance(name, str) and "made_from" not in receipt:
                return name
    return None


def losses_of(receipt: dict[str, Any], where: Path) -> tuple[Loss, ...]:
    """What the solvers said, in the receipt's order."""
    found = []
    for entry in receipt.get("losses") or []:
        entry = mapping(entry, f"{where}: an entry of losses")
        what = f"{where}: the loss {shown(entry)}"
        found.append(
            Loss(
                layer=count(entry.get("layer"), what, below=LAYERS),
                component=text(entry.get("component"), what),
                width=count(entry.get("width"), what),
                loss=number(entry.get("loss"), what),
                total=number(entry.get("total"), what),
                note=text(entry.get("note", ""), what),
                spectrum=_spectrum_of(entry.get("spectrum"), what),
            )
        )
    return tuple(found)


def _spectrum_of(entry: Any, what: str) -> Spectrum | None:
    """What a cut was made on; None where nothing is recorded, or nothing that could be drawn."""
    if entry is None:
        return None
    what = f"{what}: its spectrum"
    entry = mapping(entry, what)
    length, values = count(entry.get("length"), what), entry.get("values")
    if not isinstance(values, list) or not 0 < len(values) <= min(length, LONGEST_SPECTRUM):
        raise TrisectError(f"{what} has {shown(values)} where some numbers belong, at most one per channel.")
    shares = tuple(number(value, what) for value in values)
    if any(not later <= share <= 1 for share, later in zip(shares, (*shares[1:], 0.0), strict=True)):
        raise TrisectError(f"{what} has {shown(values)}, which are no shares that fall from 1 to 0.")
    return Spectrum(of=text(entry.get("of"), what), length=length, values=shares) if shares[0] > 0 else None


def trials_of(receipt: dict[str, Any], where: Path) -> tuple[Trial, ...]:
    """The search for the smallest model within a bound, where there was one."""
    found = []
    for entry in (receipt.get("target") or {}).get("trials") or []:
        entry = mapping(entry, f"{where}: a trial")
        ratio, rise = (number(entry.get(key), f"{where}: a trial's {key}") for key in ("ratio", "rise"))
        found.append(Trial(ratio=ratio, rise=rise, inside=entry.get("inside") is True))
    return tuple(found)


def timings_of(receipts: Iterable[dict[str, Any]], where: Path) -> dict[str, float]:
    """Seconds by stage, of everything that was done to the model; nothing is counted twice."""
    seconds: dict[str, float] = {}
    for receipt in receipts:
        tunings = (mapping(entry, f"{where}: a tuning") for entry in receipt.get("tuning") or [])
        for timed in (receipt, *tunings):
            stages = mapping(timed.get("timings") or {}, f"{where}: timings")
            for stage, value in stages.items():
                if stage not in SUMS or len(stages) == 1:
                    spent = number(value, f"{where}: the time of {stage}")
                    seconds[stage] = seconds.get(stage, 0.0) + spent
    return seconds


def number(value: Any, what: str) -> float:
    """A finite number; JSON that was read here has no others."""
    if type(value) not in (int, float):
        raise TrisectError(f"{what} has {shown(value)} where a number belongs.")
    return float(value)


def count(value: Any, what: str, *, below: int = 1 << 31) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise TrisectError(f"{what} has {shown(value)} where a count belongs.")
    return value


def text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise TrisectError(f"{what} has {shown(value)} where text belongs.")
    return value


def mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TrisectError(f"{what} is {shown(value)}, not a mapping.")
    return value


def _checked(receipt: dict[str, Any], path: Path) -> dict[str, Any]:
    for key, kind in KINDS.items():
        value = receipt.get(key)
        if value is not None and not isinstance(value, kind):
            raise TrisectError(f"{path} is no receipt of trisect: its {key} is {shown(value)}.")
    return receipt
