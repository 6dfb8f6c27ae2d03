"""What a user sees: results on stdout, progress on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Report = Callable[[str, int, int], None]
"""(stage, done, total): called again and again while a stage lasts."""

PIPED_WIDTH = 120


def stdout() -> Console:
    """The console for results; a pipe gets a fixed width, so that tables do not depend on it.

    No markup: paths and names from files may hold square brackets.
    """
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


@contextmanager
def hushed() -> Iterator[None]:
    """Keep transformers from writing between our own lines while it loads something."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # The one bar that asks nobody: its tqdm is not the one that the switch above governs.
    loud = gguf.tqdm
    gguf.tqdm = lambda entries, **_: entries
    try:
        yield
    finally:
        gguf.tqdm = loud


@contextmanager
def progress(*, quiet: bool) -> Iterator[Report]:
    """Bars on a terminal, one line per stage elsewhere, nothing when quiet."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bars:
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
