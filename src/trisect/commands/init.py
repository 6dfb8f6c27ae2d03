"""`trisect init`: every option of a verb as a commented file for --config."""

import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer

from trisect.commands import _options as options
from trisect.commands._names import completed
from trisect.errors import TrisectError, unknown_name

PANEL = "Start here"
EXAMPLES = (
    ("A file for compress, and a run with it", "trisect init compress -o run.yaml"),
    ("For another verb", "trisect init finetune -o tune.yaml"),
)
WIDTH = 100


def verb_names() -> list[str]:
    """The verbs that a file can be written for."""
    from trisect.commands._verb import verbs

    return sorted(verbs())


def run(
    verb: Annotated[
        str, typer.Argument(metavar="[VERB]", help="Whose options.", autocompletion=completed(verb_names))
    ] = "compress",
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="New file.")] = Path("run.yaml"),
    quiet: options.Quiet = False,
) -> None:
    """Write a YAML file with every option of a verb, its default and what it does."""
    from trisect.commands._screen import quoted, say_next, say_saved
    from trisect.support.files import atomic_write_text

    known = verb_names()
    if verb not in known:
        raise unknown_name("verb", verb, known)
    if out.exists():
        raise TrisectError(f"{out} exists and may hold your own settings; name another file with -o.")
    atomic_write_text(out, commented_options(verb, out))
    say_saved(out)
    say_next(f"edit it, then trisect {verb} --config {quoted(out)}", quiet=quiet)


def commented_options(verb: str, out: Path) -> str:
    """The file's text: options with a default as they are, the others as comments to fill in."""
    from typer.main import get_command

    from trisect.commands._config import by_key
    from trisect.commands._verb import build_app

    command = get_command(build_app()).commands[verb]  # type: ignore[attr-defined]
    head = [
        f"# Options of `trisect {verb}`: {_one_line(command.help)}",
        f"# Run it with: trisect {verb} --config {out.name}",
        "# What is typed on the command line wins over this file; lines left out have their default.",
    ]
    return "\n".join([*head, *(_entry(key, entry) for key, entry in by_key(command.params).items())]) + "\n"


def _entry(key: str, parameter: Any) -> str:
    import yaml

    from trisect.commands._config import is_flag, takes_many

    needed = " Needed, here or on the command line." if parameter.required else ""
    kind = "true|false" if is_flag(parameter) else parameter.metavar
    about = f"{_one_line(parameter.help)}{needed}" + (f" [{kind.strip('[]')}]" if kind else "")
    comment = textwrap.fill(about, WIDTH, initial_indent="# ", subsequent_indent="# ")
    default = parameter.default
    if default is None or parameter.required:
        line = f"# {key}: [...]" if takes_many(parameter) else f"# {key}: ..."
    else:
        value = default if isinstance(default, bool | int | float) else str(default)
        line = yaml.safe_dump({key: value}, width=10**6).strip()
    return f"\n{comment}\n{line}"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
