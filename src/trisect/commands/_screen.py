"""What a user sees: results on stdout, progress on stderr; no colour and no bars where it is piped."""

import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trisect.support.files import write_json

if TYPE_CHECKING:
    from trisect.models import Loaded

Report = Callable[[str, int, int], None]
"""(stage, done, total): called again and again while a stage lasts."""

PIPED_WIDTH = 120


@dataclass(kw_only=True)
class _Command:
    """The command that is being run, and what to put back when it ends."""

    verbose: bool = False
    endings: ExitStack = field(default_factory=ExitStack)


_running: ContextVar[_Command | None] = ContextVar("_running", default=None)


@contextmanager
def one_command() -> Iterator[None]:
    """Settings that a command changes, in here or in other libraries, are as before when it ends."""
    command = _Command()
    token = _running.set(command)
    try:
        with command.endings:
            yield
    finally:
        _running.reset(token)


def set_verbose(verbose: bool) -> None:
    """Say more, or not, until the command ends."""
    command = _running.get()
    if command is not None and verbose:
        command.verbose = True
        command.endings.callback(_say_what_it_took, time.perf_counter())
        command.endings.callback(logging.getLogger("trisect").setLevel, logging.getLogger("trisect").level)
        logging.getLogger("trisect").setLevel(logging.DEBUG)


def is_verbose() -> bool:
    """Whether --verbose was given."""
    command = _running.get()
    return command is not None and command.verbose


def stdout() -> Console:
    """The console for results; a pipe gets a fixed width, so that tables do not depend on it.

    No markup: paths and names from files may hold square brackets.
    """
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def stderr(*, quiet: bool) -> Console:
    """The console for what is being done; nothing of it when quiet."""
    return Console(stderr=True, quiet=quiet, soft_wrap=True, highlight=False, markup=False, emoji=False)


def say(line: str) -> None:
    """A line of results."""
    stdout().print(line, soft_wrap=True)


def say_saved(path: Path) -> None:
    """Where a result is."""
    stdout().print(f"Saved to {path}", soft_wrap=True)


def keep_measurement(path: Path | None, measured: Mapping[str, Any]) -> None:
    """What --json asks for; `trisect.commands._verb` has checked beforehand that it can be written."""
    if path is not None:
        write_json(path, measured)
        stdout().print(f"Measurement in {path}", soft_wrap=True)


def say_next(*lines: str, quiet: bool) -> None:
    """What a user would type next."""
    if quiet:
        return
    for line in lines:
        stdout().print(f"Next: {line}", soft_wrap=True)


def quoted(name: str | Path) -> str:
    """A name as a word of a command line."""
    return shlex.quote(str(name))


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep transformers from writing between our own lines, unless --verbose.

    In a command it stays so to the end: saving and generating have things to say too.
    """
    from trisect.support.quiet import quiet_transformers

    command = _running.get()
    with ExitStack() as here:
        if not is_verbose():
            stack = here if command is None else command.endings
            stack.enter_context(quiet_transformers())
        yield


def load(name: str, *, dtype: str | None, device: str, trust_remote_code: bool, stream: str = "off") -> "Loaded":
    """Load a model with transformers' own chatter turned off."""
    from trisect.models import load_model

    with quiet_libraries():
        return load_model(name, dtype=dtype, device=device, trust_remote_code=trust_remote_code, stream=stream)


@contextmanager
def progress(*, quiet: bool) -> Iterator[Report]:
    """Bars on a terminal, one line per stage elsewhere, nothing when quiet."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = quiet or not console.is_terminal
    # Lines for stdout must stay there: rich would move them to stderr, where the bars are.
    with Progress(*columns, console=console, transient=True, disable=hidden, redirect_stdout=False) as bars:
        tasks = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
                if hidden and not quiet:
                    console.print(f"{stage} ...")
            bars.update(tasks[stage], completed=done, total=total, visible=done < total)

        yield report


def of_stage(report: Report, stage: str) -> Callable[[int, int], None]:
    """A two-number callback that reports as one stage."""
    return lambda done, total: report(stage, done, total)


def _say_what_it_took(start: float) -> None:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    line = f"took {time.perf_counter() - start:.1f} s, at most {peak / 1e9:.2f} GB of memory"
    print(line, file=sys.stderr)
