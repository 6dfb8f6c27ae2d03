"""`trisect` as a command that reaches this machine and no other: a script, with the command's words."""

import socket
import sys
from typing import Any

HERE = ("127.0.0.1", "localhost", None)
_look_up = socket.getaddrinfo


def look_up(host: Any, *rest: Any, **more: Any) -> Any:
    """The addresses of this machine; no other name is looked up."""
    if host not in HERE:
        raise socket.gaierror(f"{host} is not this machine")
    return _look_up(host, *rest, **more)


if __name__ == "__main__":
    socket.getaddrinfo = look_up
    from trisect.cli import main

    sys.exit(main(sys.argv[1:]))
