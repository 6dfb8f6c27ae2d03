"""`trisect serve`: an OpenAI-compatible server around a model."""

from pathlib import Path
from typing import Annotated

from trisect.commands import _screen as screen
from trisect.commands._options import argument, verb
from trisect.errors import TrisectError


@verb("Use")
def run(
    model: Annotated[str, argument("Compressed folder, stock folder, or hub id.", "MODEL")],
    extra: Annotated[list[str] | None, argument("Options of the server itself, behind --.", "[-- OPTION...]")] = None,
) -> None:
    """Start vLLM's OpenAI server for a model, or transformers' own where vLLM is not installed.

    Serve a compressed folder: trisect serve small
    On another port, two GPUs: trisect serve small -- --port 9000 --tensor-parallel-size 2
    """
    from trisect.serve.server import request_line, serve, server_command

    if model.startswith((".", "/", "~")) and not (Path(model).expanduser() / "config.json").exists():
        raise TrisectError(f"{model} is no model folder: it has no config.json.")
    command = server_command(model, extra or ())
    server = command[2].split(".")[0] if command[1] == "-m" else "transformers serve"
    screen.say(f"starting {server}; once it answers:", request_line(model, extra or ()))
    serve(command)
