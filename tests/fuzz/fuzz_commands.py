"""Whole commands, run in this process."""

import contextlib
import io
import sys

from trisect.cli import main
from trisect.errors import TrisectError


def command(*words: object) -> None:
    """A whole command: 0, or 2 with one line on stderr, which is raised as the error that it was."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    lines = [line for line in err.getvalue().splitlines() if line.startswith("error: ")]
    assert "Traceback" not in err.getvalue(), err.getvalue()
    if code == 2:
        assert len(lines) == 1, err.getvalue()
        raise TrisectError(lines[0])
    assert code == 0, f"exit code {code}: {err.getvalue()}"


def quiet_libraries() -> None:
    """Progress bars and warnings of ten thousand loads help nobody."""
    import warnings

    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    sys.dont_write_bytecode = True
