"""Times and memory of a device: events on a GPU, the clock and the process's pages on a CPU."""

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
FORGET_PEAK = (Path("/proc/self/clear_refs"), "5")
"""Linux: sets the peak of the resident memory back to what is resident."""


@dataclass(frozen=True, kw_only=True)
class Laps:
    """Seconds of the same work, done again and again."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return self.percentile(50)

    def percentile(self, percent: float) -> float:
        """Between the two nearest laps, in a straight line."""
        ordered = sorted(self.seconds)
        place = (len(ordered) - 1) * percent / 100
        below, above = math.floor(place), math.ceil(place)
        return ordered[below] + (place - below) * (ordered[above] - ordered[below])

    @property
    def mean(self) -> float:
        return sum(self.seconds) / len(self.seconds)


Lapping = Callable[[Callable[[], object], int], Laps]
"""Runs work a number of times: what measures takes this, so that tests can count instead of wait."""


def laps_on(device: str) -> Lapping:
    """The way to time work on a device."""
    return _cuda_laps if is_cuda(device) else _cpu_laps


def _cuda_laps(work: Callable[[], object], count: int) -> Laps:
    """From the end of one lap to the end of the next, on the device, without waiting in between.

    Where the host cannot keep up, the gaps that it leaves are inside: that is what a user waits for.
    """
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    pairs = zip(marks, marks[1:], strict=False)
    return Laps(seconds=tuple(first.elapsed_time(second) / 1000 for first, second in pairs))


def _cpu_laps(work: Callable[[], object], count: int) -> Laps:
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return Laps(seconds=tuple(seconds))


def is_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"


class PeakMemory:
    """The most memory that was held since this was made: of tensors on a GPU, of the process on a CPU."""

    def __init__(self, device: str):
        self.device, self.known = device, True
        if is_cuda(device):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return
        path, word = FORGET_PEAK
        try:
            path.write_text(word)
        except OSError:
            self.known = False  # the process's peak may be from long ago

    def bytes(self) -> int | None:
        """None where nobody knows."""
        if is_cuda(self.device):
            return int(torch.cuda.max_memory_allocated())
        return _status("VmHWM") if self.known else None


def release() -> None:
    """Give back what the last model held, before the next one is built."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        # Every captured graph leaves 64 MiB of working space of cuBLAS behind, which is not the next model's.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def device_name(device: str) -> str:
    """The accelerator's own name, or the processor's with its threads."""
    if is_cuda(device):
        return str(torch.cuda.get_device_name(torch.device(device)))
    from trisect.support.receipt import hardware

    return f"{hardware()['cpu']}, {torch.get_num_threads()} threads"


def _status(name: str) -> int | None:
    if not STATUS.exists():
        return None
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return None


def summary(laps: Laps, percents: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """Percentiles by name, in seconds."""
    return {f"p{percent}": laps.percentile(percent) for percent in percents}
