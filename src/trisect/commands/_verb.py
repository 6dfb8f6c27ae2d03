"""What every verb has besides its own options: --config, --verbose, and examples below its help."""

import functools
import importlib
import inspect
import pkgutil
import shlex
from collections.abc import Callable, Sequence
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from trisect.commands._config import Config, without_replaced_goals
from trisect.commands._screen import set_verbose
from trisect.commands._settings import RECORDS, build_settings, parameters_for
from trisect.support.files import check_writable
from trisect.support.receipt import package_version

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
    """A verb's `run` with the options that all verbs share, and those of the records it asks for."""
    signature = inspect.signature(run)
    records = {name: entry.annotation for name, entry in signature.parameters.items() if entry.annotation in RECORDS}

    @functools.wraps(run)
    def command(context: typer.Context, config_file: Any, verbose: bool, **options: Any) -> None:
        set_verbose(verbose)
        if options.get("json") is not None:
            check_writable(options["json"])
        if config_file is not None:
            options = without_replaced_goals(context, options)
        try:
            settings = {name: build_settings(kind, options) for name, kind in records.items()}
            run(**options, **settings)
        except KeyboardInterrupt as error:
            raise Interrupted(str(error)) from error

    shared = [
        Parameter("config_file", Parameter.KEYWORD_ONLY, default=None, annotation=Config),
        Parameter("verbose", Parameter.KEYWORD_ONLY, default=False, annotation=Verbose),
        Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context),
    ]
    # Keyword-only throughout, so that an option without a default may follow one that has one.
    own = []
    for name, entry in signature.parameters.items():
        own += parameters_for(records[name]) if name in records else [entry.replace(kind=Parameter.KEYWORD_ONLY)]
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


def build_app() -> typer.Typer:
    """One verb per module of `trisect.commands`: its name is the verb, `run` its function."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(_root)
    for name, verb in verbs().items():
        add = app.command(name=name, epilog=epilog_of(verb), rich_help_panel=verb.PANEL)
        add(command_of(verb.run))
    return app


def verbs() -> dict[str, ModuleType]:
    """The modules of `trisect.commands` that are verbs."""
    found = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    names = [name for name in found if not name.startswith("_")]
    return in_order({name: importlib.import_module(f"trisect.commands.{name}") for name in names})


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"trisect {package_version('trisect') or '(from source, not installed)'}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compress language models after training, in closed form."""
