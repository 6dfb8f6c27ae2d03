"""benchmarks/short_prompts.py: every model in every lap, by a clock that tests move themselves."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from loading import module_at

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "short_prompts.py"
MODELS = [("dense", ""), ("owned", ""), ("trisect", "0.2"), ("trisect", "0.4")]
NEEDED = dict(zip(MODELS, (1.0, 0.9, 0.8, 0.6), strict=True))
"""Seconds of made-up work."""
LAUNCHING = 0.75
"""The host's share of them."""


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return module_at(PATH)


class DriftingHost:
    """Work that alone moves a clock, whose pace changes in a straight line: by `drift` a second."""

    def __init__(self, drift: float):
        self.now, self.drift, self.left = 0.0, drift, 0.0
        self.order: list[tuple[str, str]] = []

    def clock(self) -> float:
        return self.now + self.drift * self.now**2 / 2

    def work(self, model: tuple[str, str]) -> Callable[[], None]:
        def once() -> None:
            self.order.append(model)
            self.now += LAUNCHING * NEEDED[model]
            self.left += (1 - LAUNCHING) * NEEDED[model]

        return once

    def settle(self) -> None:
        self.now, self.left = self.now + self.left, 0.0

    def works(self) -> dict[tuple[str, str], Callable[[], None]]:
        return {model: self.work(model) for model in MODELS}


def test_every_size_has_every_model_and_the_file_grows_with_each(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written = tmp_path / "short-prompts.json", []
    kept = bench.write_json
    monkeypatch.setattr(bench, "write_json", lambda *args: (written.append(args[1]["rows"][:]), kept(*args)))
    ticks = itertools.count()
    bench.main(["--device", "cpu", "--tiny", "--laps", "2", "--json", str(path)], clock=lambda: float(next(ticks)))
    data = json.loads(path.read_text())
    sizes = {size: [] for size in bench.TINY_SIZES}
    for row in data["rows"]:
        sizes[row["batch"], row["length"]].append((row["kind"], row["asked"]))
    assert all(models == MODELS for models in sizes.values())
    assert [len(rows) for rows in written] == [len(MODELS), 2 * len(MODELS)]
    # A tick from the start to the launch, and one from there to the end: whatever the model.
    assert all((row["launched_seconds"], row["seconds"]) == (1.0, 2.0) for row in data["rows"])
    assert all(row["paired"] == row["against_dense"] == 1 for row in data["rows"] if row["kind"] == "dense")
    assert all(row["removed"] > 0 for row in data["rows"] if row["kind"] == "trisect")
    recipe = data["receipt"]["recipe"]
    assert (recipe["benchmark"], recipe["shape"], recipe["laps"]) == ("short_prompts", bench.SHAPE, 2)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(data["rows"])
    assert "trisect 0.4" in table[-1]


def test_models_take_turns_there_and_back(bench: ModuleType) -> None:
    host = DriftingHost(drift=0.0)
    times = bench.laps_in_turn(host.works(), 4, clock=host.clock, settle=host.settle)
    assert host.order == 2 * [*MODELS, *reversed(MODELS)]
    for model, seconds in NEEDED.items():
        assert times[model].done == pytest.approx(4 * [seconds])
        assert times[model].launched == pytest.approx(4 * [LAUNCHING * seconds])


def test_what_an_earlier_model_left_to_do_is_not_the_next_one_s(bench: ModuleType) -> None:
    host = DriftingHost(drift=0.0)
    host.left = 100.0
    times = bench.laps_in_turn(host.works(), 1, clock=host.clock, settle=host.settle)
    assert times["dense", ""].done == pytest.approx([NEEDED["dense", ""]])


@pytest.mark.parametrize("drift", [0.01, -0.005])
def test_a_drift_of_the_host_is_not_in_the_ratio(bench: ModuleType, drift: float) -> None:
    host, laps = DriftingHost(drift), 20
    times = bench.laps_in_turn(host.works(), laps, clock=host.clock, settle=host.settle)
    dense = times["dense", ""]
    assert abs(dense.done[-1] / dense.done[0] - 1) > 0.25  # the host is not what it was
    for model, seconds in NEEDED.items():
        assert bench.compared(times[model], dense)["paired"] == pytest.approx(seconds, rel=1e-3)
    assert bench.compared(dense, dense)["paired"] == 1

    # One model after the other, the narrowest comes out far from its work.
    host = DriftingHost(drift)
    alone = {m: bench.laps_in_turn({m: host.work(m)}, laps, clock=host.clock, settle=host.settle) for m in MODELS}
    last = bench.compared(alone[MODELS[-1]][MODELS[-1]], alone[MODELS[0]][MODELS[0]])
    assert abs(last["paired"] / NEEDED[MODELS[-1]] - 1) > 0.1


@pytest.mark.parametrize("laps", ["0", "3", "-2"])
def test_laps_are_pairs(bench: ModuleType, laps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--device", "cpu", "--tiny", "--laps", laps])
    assert f"even number of at least 2, not {laps}" in capsys.readouterr().err


def test_the_page_shows_what_was_written(
    bench: ModuleType, script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script("tables"), "RESULTS", tmp_path)
    path = tmp_path / "short-prompts.json"
    now, real = [0.0], bench.prefill

    def slower_when_narrow(model: Any, ids: Any) -> Callable[[], None]:
        def once() -> None:
            real(model, ids)()
            now[0] += 1.5 if hasattr(model.config, "trisect") else 1.0

        return once

    monkeypatch.setattr(bench, "prefill", slower_when_narrow)
    bench.main(["--device", "cpu", "--tiny", "--laps", "2", "--json", str(path)], clock=lambda: now[0])
    text = script("speed_tables").short_prompts()
    assert "| 1 x 16 | trisect 0.2 | 1500.00 | 1500.00 | 1.500 | 1.500 to 1.500 |" in text
    assert "| 2 x 16 | dense | 1000.00 | 1000.00 | 1.000 | 1.000 to 1.000 |" in text
