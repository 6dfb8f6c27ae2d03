"""What every verb has besides its own options: --config, --verbose, and examples below its help."""

import functools
import inspect
import shlex
from collections.abc import Callable, Sequence
from inspect import Parameter
from types import ModuleType
from typing import Annotated, Any

import typer

from trisect.commands._config import Config, without_replaced_goals
from trisect.commands._screen import set_verbose
from trisect.support.files import check_writable

Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Also what other libraries say, tracebacks, and time and memory at the end.",
        rich_help_panel="For every verb",
    ),
]


class Interrupted(Exception):
    """Ctrl-C, with one line about what is left; typer would forget the line."""


def command_of(run: Callable[..., None]) -> Callable[..., None]:
    """A verb's `run` with the options that all verbs share."""
    signature = inspect.signature(run)

    @functools.wraps(run)
    def command(context: typer.Context, config_file: Any, verbose: bool, **options: Any) -> None:
        set_verbose(verbose)
        if options.get("json") is not None:
            check_writable(options["json"])
        if config_file is not None:
            options = without_replaced_goals(context, options)
        try:
            run(**options)
        except KeyboardInterrupt as error:
            raise Interrupted(str(error)) from error

    shared = [
        Parameter("config_file", Parameter.KEYWORD_ONLY, default=None, annotation=Config),
        Parameter("verbose", Parameter.KEYWORD_ONLY, default=False, annotation=Verbose),
        Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context),
    ]
    # Keyword-only throughout, so that an option without a default may follow one that has one.
    own = [entry.replace(kind=Parameter.KEYWORD_ONLY) for entry in signature.parameters.values()]
    everything = signature.replace(parameters=[*own, *shared])
    command.__signature__ = everything  # type: ignore[attr-defined]
    command.__annotations__ = {entry.name: entry.annotation for entry in everything.parameters.values()}
    return command


PANELS = ("Start here", "Compress", "Measure", "Recover and shrink further", "Use")


def in_order(verbs: dict[str, ModuleType]) -> dict[str, ModuleType]:
    """The verbs as help shows them: what a newcomer needs first comes first."""
    return dict(sorted(verbs.items(), key=lambda entry: (PANELS.index(entry[1].PANEL), entry[0])))


def examples_of(verb: ModuleType) -> Sequence[tuple[str, str]]:
    """(what for, command line) pairs of a verb's module."""
    examples: Sequence[tuple[str, str]] = verb.EXAMPLES
    return examples


def epilog_of(verb: ModuleType) -> str:
    """The examples as text below the help, one paragraph each: typer joins the lines of a paragraph."""
    shown = (f"{purpose}:\n\n  {line}" for purpose, line in examples_of(verb))
    return "Examples\n\n" + "\n\n".join(shown)


def words(line: str) -> list[str]:
    """The arguments of an example: what stands behind `trisect`."""
    return shlex.split(line)[1:]
