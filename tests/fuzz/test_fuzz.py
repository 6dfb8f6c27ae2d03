"""Hostile input of every kind: always a clear error or a right result, and nothing else.

A few hundred inputs of the ten thousand that experiments/fuzz.py runs, by the same numbers.
"""

import os
from collections import Counter
from pathlib import Path
from random import Random

import fuzz_guard
import pytest
from fuzz_commands import quiet_libraries
from fuzz_mutations import mutated, to_json
from fuzz_run import try_inputs
from fuzz_seeds import RUN, Seeds
from fuzz_targets import TARGETS, Place, Target, kind_of

from trisect.errors import TrisectError

INPUTS = 390
PIECE = 65


@pytest.mark.parametrize("start", range(0, INPUTS, PIECE))
def test_hostile_inputs_end_in_a_clear_error_or_a_right_result(
    start: int, seeds: Seeds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet_libraries()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    findings = list(try_inputs(range(start, start + PIECE), seeds, tmp_path / "home", seconds=60))
    bad = [finding for finding in findings if finding.outcome not in ("refused", "accepted")]
    assert not bad, "\n".join(f"input {f.index}, {f.kind}: {f.outcome} {f.detail}" for f in bad)
    # A fuzzer whose every input is refused at the door, or whose damage never hits, would test nothing.
    outcomes = Counter(finding.outcome for finding in findings)
    assert min(outcomes["refused"], outcomes["accepted"]) > PIECE // 10


def _writes_outside(random: Random, seeds: Seeds, place: Place) -> None:
    (place.out.parent / "stray").write_text("x")


def _writes_far_outside(random: Random, seeds: Seeds, place: Place) -> None:
    os.mkdir(seeds.root / "stray")


def _never_ends(random: Random, seeds: Seeds, place: Place) -> None:
    while True:
        pass


def _waits(random: Random, seeds: Seeds, place: Place) -> None:
    os.mkfifo(place.given / "pipe")
    (place.given / "pipe").read_text()


def _asks_for_memory(random: Random, seeds: Seeds, place: Place) -> None:
    raise TrisectError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


def _breaks(random: Random, seeds: Seeds, place: Place) -> None:
    raise KeyError("layers")


@pytest.mark.parametrize(
    ("target", "outcome"),
    [
        (_writes_outside, "outside"),
        (_writes_far_outside, "outside"),
        (_never_ends, "hang"),
        (_waits, "hang"),
        (_asks_for_memory, "memory"),
        (_breaks, "crash"),
    ],
)
def test_the_fuzzer_sees_what_it_looks_for(
    target: Target, outcome: str, seeds: Seeds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TARGETS, kind_of(0), (1, target))
    monkeypatch.setattr(fuzz_guard, "WAITING", 1)
    (found,) = try_inputs([0], seeds, tmp_path / "home", seconds=1)
    assert found.outcome == outcome


def test_the_same_number_gives_the_same_input() -> None:
    first, second = (to_json(mutated(Random("7"), RUN)) for _ in range(2))
    assert first == second
    others = {to_json(mutated(Random(str(n)), RUN)) for n in range(50)}
    assert len(others) > 40


def test_every_kind_of_input_comes_up() -> None:
    total = sum(share for share, _ in TARGETS.values())
    counts = Counter(kind_of(index) for index in range(total))
    assert counts == {kind: share for kind, (share, _) in TARGETS.items()}
    assert total < INPUTS
