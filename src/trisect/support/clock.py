"""Seconds per stage of a run; a stage inside another interrupts it.

On a GPU the marks are events in the stream, read when the clock stops, so that timing makes nothing wait.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch


class Clock:
    """Marks in time, each with the stage whose time ends there."""

    def __init__(self, device: str | torch.device = "cpu"):
        self.device = torch.device(device)
        self.open: list[str] = []  # stages that have begun, the innermost last
        self.marks: list[tuple[str, Any]] = []  # a stage, and where its time ends: seconds, or an event on a GPU

    def mark(self) -> None:
        """The time since the last mark goes to the innermost open stage."""
        name = self.open[-1] if self.open else "other"
        if self.device.type != "cuda":
            self.marks.append((name, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.marks.append((name, event))

    def seconds(self) -> dict[str, float]:
        """Seconds by stage so far."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        total: dict[str, float] = {}
        for (_, before), (name, after) in zip(self.marks, self.marks[1:], strict=False):
            spent = after - before if isinstance(before, float) else before.elapsed_time(after) / 1e3
            total[name] = total.get(name, 0.0) + spent
        return total


_running: ContextVar[Clock | None] = ContextVar("clock", default=None)


@contextmanager
def timing(device: str | torch.device = "cpu") -> Iterator[Clock]:
    """A clock for the stages inside."""
    clock = Clock(device)
    token = _running.set(clock)
    clock.mark()
    try:
        yield clock
    finally:
        clock.mark()
        _running.reset(token)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Count the time inside as this stage's, where a clock runs."""
    clock = _running.get()
    if clock is None:
        yield
        return
    clock.mark()
    clock.open.append(name)
    try:
        yield
    finally:
        clock.mark()
        clock.open.pop()
