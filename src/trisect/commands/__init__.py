"""The verbs, a file for each panel of the help. To add one, write a function with the decorator `@verb(PANEL)`.

Its docstring is the help text and, below, examples. Every verb gets --config, --quiet and --verbose from here. A
parameter whose type is a record becomes the record's options (`_options.py`). Heavy imports (torch, transformers)
belong inside functions: `trisect --help` must be fast.
"""

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from trisect.commands import _options, _screen
from trisect.commands._options import option
from trisect.support.receipt import package_version

PANELS = ("Start here", "Compress", "Measure", "Recover and shrink further", "Use")
EVERY_VERB = "For every verb"
Quiet = Annotated[bool, option("Results only: no progress, no hints.", None, "--quiet", "-q", panel=EVERY_VERB)]
Verbose = Annotated[bool, option("Tracebacks, time, memory, more lines.", None, "--verbose", "-v", panel=EVERY_VERB)]
FROM_FILE: Any = {"panel": EVERY_VERB, "is_eager": True, "callback": _options.read_options}
ABOUT_CONFIG = "YAML with options as keys; those typed here win. `trisect init VERB` writes one."
Config = Annotated[Path | None, option(ABOUT_CONFIG, "FILE", "--config", **FROM_FILE)]


class Interrupted(Exception):
    """Ctrl-C, with one line about what is left; typer would forget the line."""


def command_of(run: Callable[..., None]) -> Callable[..., None]:
    """typer's command for a verb: `run` with the options of its records and those that all verbs share."""
    own = signature(run).parameters
    records = {name: entry.annotation for name, entry in own.items() if entry.annotation in _options.RECORDS}

    def command(
        *,
        quiet: Quiet = False,
        config_file: Config = None,
        verbose: Verbose = False,
        context: typer.Context,
        **given: Any,
    ) -> None:
        _screen.begin(quiet=quiet, verbose=verbose)
        if config_file is not None:
            given = _options.without_replaced_goals(context, given)
        typed = dict(given)
        made = {name: _options.build_record(kind, given) for name, kind in records.items()}
        _options.check_early(context, typed)
        try:
            run(**made, **given)
        except KeyboardInterrupt as error:
            raise Interrupted(str(error)) from error

    shared = [entry for entry in signature(command).parameters.values() if entry.kind is Parameter.KEYWORD_ONLY]
    parameters = [*(entry for parameter in own.values() for entry in _options.expanded(parameter)), *shared]
    command.__doc__ = run.__doc__
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {entry.name: entry.annotation for entry in parameters}
    return command


@cache
def verbs() -> dict[str, _options.Verb]:
    """The verbs by name, in the order of the panels of help."""
    for entry in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"trisect.commands.{entry.name}")
    return dict(sorted(_options.VERBS.items(), key=lambda entry: (PANELS.index(entry[1].panel), entry[0])))


def build_app() -> typer.Typer:
    """typer's app with all verbs."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(_root)
    for name, verb in verbs().items():
        # One paragraph each: typer joins the lines of a paragraph.
        examples = "\n\n".join(f"{purpose}:\n\n  {line}" for purpose, line in verb.examples)
        about: Any = {"epilog": f"Examples\n\n{examples}", "rich_help_panel": verb.panel}
        app.command(name=name, **about)(command_of(verb.run))
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"trisect {package_version('trisect') or '(from source, not installed)'}")
        raise typer.Exit


Version = Annotated[bool, option("Print the version.", None, "--version", callback=_print_version, is_eager=True)]


def _root(version: Version = False) -> None:
    """Compress language models after training, in closed form."""
