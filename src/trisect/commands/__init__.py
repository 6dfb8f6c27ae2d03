"""The verbs, one file each. To add one, write `commands/VERB.py` with a function `run`.

Its docstring is the help text; PANEL says where help lists the verb, EXAMPLES what stands below its help.
Every verb gets --config, --quiet and --verbose from here. A parameter of `run` whose type is a record of settings
stands for the record's options (`_options.py`). Files that start with an underscore hold what several verbs share.
Heavy imports (torch, transformers) belong inside functions: `trisect --help` must be fast.
"""

import functools
import importlib
import pkgutil
import shlex
from collections.abc import Callable, Sequence
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from trisect.commands import _config, _options, _screen
from trisect.support.files import check_writable
from trisect.support.receipt import package_version

PANELS = ("Start here", "Compress", "Measure", "Recover and shrink further", "Use")


def _shared(kind: Any, default: Any, *names: str, help: str, **more: Any) -> Any:
    option = typer.Option(*names, help=help, rich_help_panel="For every verb", **more)
    return {"annotation": Annotated[kind, option], "default": default}


SHARED = {
    "quiet": _shared(bool, False, "--quiet", "-q", help="Results only: no progress, no hints."),
    "config_file": _shared(
        Path | None,
        None,
        "--config",
        help="YAML with options as keys; those typed here win. `trisect init VERB` writes one.",
        metavar="FILE",
        is_eager=True,
        callback=_config.read_options,
    ),
    "verbose": _shared(
        bool,
        False,
        "--verbose",
        "-v",
        help="Also what other libraries say, tracebacks, and time and memory at the end.",
    ),
    "context": {"annotation": typer.Context},
}
"""Options of every verb."""


class Interrupted(Exception):
    """Ctrl-C, with one line about what is left; typer would forget the line."""


def command_of(run: Callable[..., None]) -> Callable[..., None]:
    """A verb's `run` with the options that all verbs share, and those of the records it asks for."""
    declared = signature(run)
    own = declared.parameters
    records = {name: entry.annotation for name, entry in own.items() if entry.annotation in _options.RECORDS}

    @functools.wraps(run)
    def command(context: typer.Context, config_file: Any, quiet: bool, verbose: bool, **options: Any) -> None:
        _screen.begin(quiet=quiet, verbose=verbose)
        if options.get("json") is not None:
            check_writable(options["json"])
        if config_file is not None:
            options = _config.without_replaced_goals(context, options)
        try:
            settings = {name: _options.build_record(kind, options) for name, kind in records.items()}
            run(**options, **settings)
        except KeyboardInterrupt as error:
            raise Interrupted(str(error)) from error

    parameters = [entry for parameter in own.values() for entry in _options.expanded(parameter)]
    parameters += [Parameter(name, Parameter.KEYWORD_ONLY, **about) for name, about in SHARED.items()]
    command.__signature__ = declared.replace(parameters=parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {entry.name: entry.annotation for entry in parameters}
    return command


def verbs() -> dict[str, ModuleType]:
    """The modules of `trisect.commands` that are verbs; what a newcomer needs first comes first."""
    names = [entry.name for entry in pkgutil.iter_modules([str(Path(__file__).parent)]) if entry.name[0] != "_"]
    found = {name: importlib.import_module(f"trisect.commands.{name}") for name in names}
    return dict(sorted(found.items(), key=lambda entry: (PANELS.index(entry[1].PANEL), entry[0])))


def examples_of(verb: ModuleType) -> Sequence[tuple[str, str]]:
    """(what for, command line) pairs of a verb's module."""
    examples: Sequence[tuple[str, str]] = verb.EXAMPLES
    return examples


def words(line: str) -> list[str]:
    """The arguments of an example: what stands behind `trisect`."""
    return shlex.split(line)[1:]


def build_app() -> typer.Typer:
    """One verb per module of `trisect.commands`: its name is the verb, `run` its function."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(_root)
    for name, verb in verbs().items():
        # One paragraph each: typer joins the lines of a paragraph.
        examples = "\n\n".join(f"{purpose}:\n\n  {line}" for purpose, line in examples_of(verb))
        add = app.command(name=name, epilog=f"Examples\n\n{examples}", rich_help_panel=verb.PANEL)
        add(command_of(verb.run))
    return app


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
