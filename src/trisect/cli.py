"""The command line: finds the verbs, runs one, and turns bad input into one clear line."""

import importlib
import logging
import pkgutil
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from trisect import commands
from trisect.errors import TrisectError
from trisect.receipt import package_version

BAD_INPUT = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; unexpected exceptions keep their traceback."""
    _show_warnings()
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        code = build_app()(args=arguments, prog_name="trisect", standalone_mode=False)
    except TrisectError as error:
        return _fail(str(error), code=BAD_INPUT)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        # Usage errors of typer, whose class moved when it took click in; this is what they share.
        if not hasattr(error, "format_message"):
            raise
        return _fail(f"{error.format_message().rstrip('.')}. See `trisect --help`.", code=BAD_INPUT)
    if code == INTERRUPTED:
        return _fail("interrupted; no half-written output was left behind.", code=INTERRUPTED)
    return code or 0


def build_app() -> typer.Typer:
    """One verb per module of `trisect.commands`: its name is the verb, `run` its function."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_root)
    for module in pkgutil.iter_modules(commands.__path__):
        if not module.name.startswith("_"):
            verb = importlib.import_module(f"{commands.__name__}.{module.name}")
            app.command(name=module.name)(verb.run)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"trisect {package_version('trisect') or '(from source, not installed)'}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Compress language models after training, in closed form."""


def _show_warnings() -> None:
    logger = logging.getLogger("trisect")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("warning: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def _fail(message: str, *, code: int) -> int:
    # Messages quote names from files, which may hold what a terminal would take for commands.
    line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(message.split()))
    print(f"error: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
