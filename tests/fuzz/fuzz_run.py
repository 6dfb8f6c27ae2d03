"""Runs hostile inputs by number and says what became of each."""

import os
import shutil
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fuzz_guard import Hang, Watch, peak_memory, the_watch, time_limit
from fuzz_seeds import Seeds
from fuzz_targets import OUT_OF_MEMORY, Place, attempt, kind_of

MOST_MEMORY = 400 << 20
"""Bytes that one tiny input may add to the process."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    index: int
    kind: str
    outcome: str
    """refused, accepted, crash, hang, memory or outside."""
    detail: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def try_inputs(
    indices: Iterable[int], seeds: Seeds, home: Path, *, seconds: int, whole: float = 1.0
) -> Iterator[Finding]:
    """Try each input in a fresh folder below `home`; the caller's working folder is not written to."""
    watch = the_watch()
    for index in indices:
        place = Place(given=home / "given", out=home / "out", whole=whole)
        for folder in (place.given, place.out):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        yield _try(index, seeds, place, watch, seconds)


def _try(index: int, seeds: Seeds, place: Place, watch: Watch, seconds: int) -> Finding:
    before, detail = peak_memory(), ""
    # Inputs are written to `given` by the fuzzer itself; everything else must go to `out`.
    with watch.within(place.out, place.given) as outside:
        try:
            with time_limit(seconds):
                outcome = attempt(index, seeds, place)
        except Hang as error:
            outcome, detail = "hang", str(error)
        except BaseException as error:  # whatever it is, it is a finding
            outcome, detail = "crash", "".join(traceback.format_exception(error))
            if isinstance(error, MemoryError) or any(words in str(error).lower() for words in OUT_OF_MEMORY):
                outcome = "memory"
    strays = [path for path in place.given.parent.iterdir() if path.name not in ("given", "out")]
    if outside or strays:
        outcome, detail = "outside", "; ".join([*outside, *map(str, strays)])
    elif peak_memory() - before > MOST_MEMORY:
        outcome, detail = "memory", f"{(peak_memory() - before) >> 20} MiB more"
    return Finding(index=index, kind=kind_of(index), outcome=outcome, detail=detail)


def enter(home: Path) -> None:
    """Make `home` the working folder, the home and the place of every cache."""
    home.mkdir(parents=True, exist_ok=True)
    os.chdir(home)
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR"):
        os.environ[name] = str(home)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRISECT_GGUF_CACHE"] = "0"
