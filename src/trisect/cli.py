"""The command line: finds the verbs, runs one, and turns bad input into one clear line."""

import errno
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from trisect.commands import Interrupted, _options, _screen, build_app
from trisect.errors import TrisectError
from trisect.support import checks, spare_imports

BAD_INPUT = 2
INTERRUPTED = 130
UNTOUCHED = "no half-written output was left behind."
BARS = ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; unexpected exceptions keep their traceback."""
    _show_warnings()
    if argv is None:
        spare_imports()
        # Other libraries draw bars into pipes too, unless this is set before they are imported.
        for name in () if sys.stderr.isatty() else BARS:
            os.environ.setdefault(name, "1")
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    with _screen.one_command() as command:
        try:
            code = build_app()(args=arguments, prog_name="trisect", standalone_mode=False)
        except TrisectError as error:
            if command.verbose:
                traceback.print_exc()
            return _fail(str(error), code=BAD_INPUT)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            return _fail(f"The name {checks.shown(error.filename)} is too long; give a shorter one.", code=BAD_INPUT)
        except (Interrupted, KeyboardInterrupt) as error:
            return _fail(f"interrupted: {str(error) or UNTOUCHED}", code=INTERRUPTED)
        except Exception as error:
            # Usage errors of typer, whose class moved when it took click in; this is what they share.
            if not hasattr(error, "format_message"):
                raise
            return _fail(_usage(error), code=BAD_INPUT)
    if code == INTERRUPTED:  # typer's own answer to Ctrl-C, while it still parses
        return _fail(f"interrupted: {UNTOUCHED}", code=INTERRUPTED)
    return code or 0


def _show_warnings() -> None:
    logger = logging.getLogger("trisect")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("warning: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False


def _usage(error: Exception) -> str:
    """typer's message, the file that the value came from, and which help to read."""
    context = getattr(error, "ctx", None)
    place = "trisect" if context is None else context.command_path
    message: str = error.format_message()  # type: ignore[attr-defined]
    message = message if message.endswith(("?", ".")) else f"{message}."
    return f"{_options.blame(error)}{message} See `{place} --help`."


def _fail(message: str, *, code: int) -> int:
    # Messages quote names from files, which may hold what a terminal would take for commands.
    line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(message.split()))
    print(f"error: {line}", file=sys.stderr)
    return code
