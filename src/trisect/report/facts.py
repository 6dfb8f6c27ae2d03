"""The headline: sizes counted from shapes and files, measurements matched to the models they are about."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from trisect.errors import TrisectError
from trisect.plan.budget import PREFILL_LENGTH, budget_of
from trisect.report.records import AFTER, BEFORE, SIZE, Fact, Quantity, Reading, Run
from trisect.support.checks import shown

BITS = Quantity(kind=SIZE, name="bits per dense parameter", detail="weight files over parameters before")
PARAMETERS = Quantity(kind=SIZE, name="parameters", detail="embeddings included")
KV_CACHE = Quantity(kind=SIZE, name="KV cache per token", detail="at the same precision", unit="B")
FLOPS = Quantity(kind=SIZE, name="FLOPs", detail=f"a prefill of {PREFILL_LENGTH} tokens, decoder layers")


def size_facts(run: Run) -> list[Fact]:
    """What needs no measuring."""
    old, new = budget_of(run.before), budget_of(run.after)
    width = run.before.bytes_per_element
    pairs = {
        PARAMETERS: (old.parameters, new.parameters),
        Quantity(kind=SIZE, name="decoder linear weights"): (old.linear_parameters, new.linear_parameters),
        Quantity(
            kind=SIZE,
            name="weights in bytes",
            detail=f"before: {width} per parameter; after: the files",
            unit="B",
        ): (old.parameters * width, run.weight_bytes),
        BITS: (8 * width, 8 * run.weight_bytes / old.parameters),
        KV_CACHE: (old.kv_bytes_per_token, new.kv_bytes_per_token),
        FLOPS: (old.flops, new.flops),
    }
    return [Fact(quantity=quantity, before=was, after=now) for quantity, (was, now) in pairs.items()]


def with_facts(run: Run, readings: Iterable[Reading]) -> Run:
    """The run with its sizes and with readings whose side is known; later ones win."""
    sides: dict[Quantity, dict[str, Reading]] = {}
    for reading in readings:
        assert reading.side in (BEFORE, AFTER)
        sides.setdefault(reading.quantity, {})[str(reading.side)] = reading
    measured = [_fact(quantity, both.get(BEFORE), both.get(AFTER)) for quantity, both in sides.items()]
    return replace(run, facts=(*size_facts(run), *measured))


def _fact(quantity: Quantity, before: Reading | None, after: Reading | None) -> Fact:
    was, now = (None if reading is None else reading.value for reading in (before, after))
    errors = [reading.error for reading in (before, after) if reading is not None]
    known = [error for error in errors if error is not None]
    error = math.hypot(*known) if len(known) == 2 else None
    return Fact(quantity=quantity, before=was, after=now, error=error)


def assigned(
    readings: Sequence[Reading], runs: Sequence[Run], where: str, *, owner: Run | None = None
) -> dict[str, list[Reading]]:
    """Run's name -> the readings about it, or about the model it came from.

    What is about nobody else is about the `owner`, whose folder the file lies in and may have been renamed.
    """
    found: dict[str, list[Reading]] = {run.name: [] for run in runs}
    used = False
    for reading in readings:
        others = [] if owner is None else [(owner, AFTER)]
        for run, side in _about(reading.model, runs) or others:
            if reading.side is not None and side == BEFORE and reading.side == AFTER:
                continue
            found[run.name].append(replace(reading, side=reading.side or side))
            used = True
    if not used:
        models = ", ".join(sorted({shown(reading.model) for reading in readings}))
        names = ", ".join(run.name for run in runs)
        raise TrisectError(
            f"{where} is about {models}, which is neither a run given ({names}) nor what one was made from."
        )
    return found


def _about(model: str, runs: Sequence[Run]) -> list[tuple[Run, str]]:
    """The runs that a model's name means, and on which side; a folder that was moved is known by its name."""
    for same in (_same_place, _same_name):
        after = [(run, AFTER) for run in runs if same(model, str(run.folder))]
        before = [(run, BEFORE) for run in runs if run.source is not None and same(model, run.source)]
        if after or before:
            return after or before
    return []


def _same_place(one: str, other: str) -> bool:
    return one == other or Path(one).resolve() == Path(other).resolve()


def _same_name(one: str, other: str) -> bool:
    return Path(one).name == Path(other).name
