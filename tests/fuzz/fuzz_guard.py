"""What a hostile input must not do: hang, take memory without bound, write outside its output folder."""

import contextlib
import os
import resource
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

WAITING = 6
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PATHS = {
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "shutil.rmtree": (0,),
    "shutil.move": (0, 1),
    "shutil.copyfile": (1,),
}
"""Audit events that change files, and which of their arguments are the paths."""


class Hang(BaseException):
    """Not an Exception, so that nobody who explains errors can swallow it."""


class Watch:
    """Listens, through Python's audit events, to every file that is written while it is on."""

    def __init__(self) -> None:
        self.allowed: tuple[str, ...] | None = None
        self.outside: list[str] = []
        sys.addaudithook(self._hear)

    @contextlib.contextmanager
    def within(self, *allowed: Path) -> Iterator[list[str]]:
        """Collect the paths that are written elsewhere."""
        self.allowed, self.outside = tuple(str(path) for path in allowed), []
        try:
            yield self.outside
        finally:
            self.allowed = None

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.allowed is None:
            return
        if event == "open":
            path, _, flags = arguments
            found = [path] if isinstance(flags, int) and flags & WRITING else []
        else:
            found = [arguments[at] for at in PATHS.get(event, ())]
        for path in found:
            if isinstance(path, str | bytes | os.PathLike):
                whole = os.path.abspath(os.path.join(_base(event, arguments), os.fsdecode(path)))
                if whole != os.devnull and not whole.startswith(self.allowed):
                    self.outside.append(f"{event} {whole}")


@cache
def the_watch() -> Watch:
    """The one of this process: what listens to audit events cannot be taken away again."""
    return Watch()


def _base(event: str, arguments: tuple[Any, ...]) -> str:
    """The folder that a path is relative to: some events name it by an open handle, their last argument."""
    handle = arguments[-1] if event in ("os.remove", "os.rmdir", "os.mkdir") else -1
    return os.readlink(f"/proc/self/fd/{handle}") if isinstance(handle, int) and handle >= 0 else ""


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise Hang in the main thread after so many seconds of computing, or WAITING times as many of any kind.

    A busy machine may keep a good input waiting; one that waits for a pipe computes nothing.
    """

    def ring(*_: object) -> None:
        raise Hang(f"still running after {seconds} s of computing or {WAITING * seconds} s")

    before = {number: signal.signal(number, ring) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WAITING * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def peak_memory() -> int:
    """The most bytes this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def limit_memory(more: int) -> None:
    """Let this process take so many bytes of address space beside what it has; for worker processes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more,) * 2)
