"""`trisect` for commands that reach this machine and no other: one process imports, then forks for each command.

A line of JSON on stdin names the words, the working folder and the files for stdout and stderr; the answer is the
exit code. Importing takes seconds, and the settings of the hub's libraries are read then; a fork takes neither.
"""

import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

HERE = ("127.0.0.1", "localhost", None)
FIRST = ("torch", "datasets", "trisect.models", "trisect.pipeline.job", "transformers.models.llama.modeling_llama")
PATIENCE = 300
"""Seconds until a command that hangs is ended."""
_look_up, _sleep = socket.getaddrinfo, time.sleep


def look_up(host: Any, *rest: Any, **more: Any) -> Any:
    """The addresses of this machine; no other name is looked up."""
    if host not in HERE:
        raise socket.gaierror(f"{host} is not this machine")
    return _look_up(host, *rest, **more)


def carry_out(words: list[str], folder: str, stdout: str, stderr: str) -> NoReturn:
    """Run a command as a process that was started for it would, and end."""
    from trisect.cli import main

    code = 1
    signal.alarm(PATIENCE)
    try:
        for number, path in enumerate((os.devnull, stdout, stderr)):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
        os.chdir(folder)
        code = main(words)
    except BaseException:  # the process ends here whatever happens; what it was is in the file
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    socket.getaddrinfo = look_up
    time.sleep = lambda seconds: _sleep(min(seconds, 0.01))  # retries wait for nothing here
    for name in FIRST:
        importlib.import_module(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            carry_out(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
