"""Results on stdout, progress on stderr; neither colour nor bars where they are piped."""

import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from trisect import models
from trisect.commands._options import LoadOptions
from trisect.support import files, quiet_transformers

Report = Callable[[str, int, int], None]  # (stage, done, total): called again and again while a stage lasts

PIPED_WIDTH = 120
SILENCE = 10.0  # seconds between two lines where there are no bars


@dataclass(kw_only=True)
class Command:
    """The running command: how much it prints, and what is undone when it ends."""

    quiet: bool = False
    verbose: bool = False
    endings: ExitStack = field(default_factory=ExitStack)


_running: ContextVar[Command | None] = ContextVar("_running", default=None)


def running() -> Command:
    """The running command, or one with the defaults."""
    return _running.get() or Command()


@contextmanager
def one_command() -> Iterator[Command]:
    """A running command; settings that it changes, here or in other libraries, are undone when it ends."""
    command = Command()
    token = _running.set(command)
    try:
        with command.endings:
            yield command
    finally:
        _running.reset(token)


def begin(*, quiet: bool, verbose: bool) -> None:
    """Print less or more until the command ends."""
    command, logger = running(), logging.getLogger("trisect")
    command.quiet, command.verbose = quiet, verbose
    if verbose:
        command.endings.callback(_print_cost, time.perf_counter())
        command.endings.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.DEBUG)


def stdout() -> Console:
    """The console for results; a pipe gets a fixed width, so that tables do not depend on it."""
    # No markup: paths and names from files may hold square brackets.
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def stderr() -> Console:
    """The console for progress; silent when quiet."""
    return Console(stderr=True, quiet=running().quiet, soft_wrap=True, highlight=False, markup=False, emoji=False)


def say(*results: str | Table) -> None:
    """Print lines and tables of results."""
    for entry in results:
        stdout().print(entry, soft_wrap=isinstance(entry, str))


def say_table(left: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = (), **style: Any) -> None:
    """Print a table whose last columns hold numbers; nothing where it has no rows."""
    table = Table(*left, *(Column(name, justify="right") for name in right), title_justify="left", **style)
    for row in rows:
        table.add_row(*row)
    if table.rows:
        say(table)


def keep_measurement(path: Path | None, measured: Mapping[str, Any]) -> None:
    """Write the file of --json; that it can be written was checked early."""
    if path is not None:
        files.write_json(path, measured)
        say(f"Measurement in {path}")


def say_next(*lines: str) -> None:
    """Print the commands that a user would type next."""
    if not running().quiet:
        say(*(f"Next: {line}" for line in lines))


def quoted(name: str | Path | None) -> str:
    """A name as a word of a command line; without one, how to get the file of --json."""
    return "FILE, after --json FILE here" if name is None else shlex.quote(str(name))


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep transformers from writing between our own lines, unless --verbose."""
    # In a command it stays so to the end: saving and generating have things to say too.
    command = _running.get()
    with ExitStack() as here:
        if not running().verbose:
            (here if command is None else command.endings).enter_context(quiet_transformers())
        yield


def load(name: str, loading: LoadOptions, *, own_dtype: bool = False) -> "models.Loaded":
    """A model to compute with, or in its `own_dtype`, loaded without lines from transformers."""
    from trisect.models import checkpoint

    dtype = loading.dtype or (None if own_dtype else checkpoint.WORKING)
    with quiet_libraries():
        return checkpoint.load_model(name, **{**asdict(loading), "dtype": dtype})


@contextmanager
def progress(*, hidden: bool = False) -> Iterator[Report]:
    """Bars on a terminal, elsewhere a line when a stage begins and every ten seconds of it; nothing when quiet."""
    console, quiet = Console(stderr=True), hidden or running().quiet
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = quiet or not console.is_terminal
    # Lines for stdout must stay there: rich would move them to stderr, where the bars are.
    with Progress(*columns, console=console, transient=True, disable=hidden, redirect_stdout=False) as bars:
        tasks, printed = {}, {}  # of each stage its bar, and when it began and was last printed

        def report(stage: str, done: int, total: int) -> None:
            now = time.monotonic()
            if stage not in tasks:
                tasks[stage], printed[stage] = bars.add_task(stage, total=total), (now, now)
                if hidden and not quiet:
                    console.print(f"{stage} ...")
            began, last = printed[stage]
            if hidden and not quiet and 0 < done < total and now - last >= SILENCE:
                printed[stage] = began, now
                left = (now - began) * (total - done) / done
                console.print(f"{stage}: {done} of {total}, about {left:.0f} s left")
            bars.update(tasks[stage], completed=done, total=total, visible=done < total)

        yield report


def _print_cost(start: float) -> None:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"took {time.perf_counter() - start:.1f} s, at most {peak / 1e9:.2f} GB of memory", file=sys.stderr)
