"""`trisect init`: every option of a verb as a commented file for --config."""

import textwrap
from pathlib import Path
from typing import Annotated, Any

from trisect import commands
from trisect.commands import _config
from trisect.commands import _screen as screen
from trisect.commands._options import argument, option
from trisect.errors import TrisectError, unknown_name

PANEL = "Start here"
EXAMPLES = (
    ("A file for compress, and a run with it", "trisect init compress -o run.yaml"),
    ("For another verb", "trisect init finetune -o tune.yaml"),
)
WIDTH = 100


def run(
    verb: Annotated[str, argument("Whose options.", "[VERB]")] = "compress",
    out: Annotated[Path, option("New file.", "FILE")] = Path("run.yaml"),
) -> None:
    """Write a YAML file with every option of a verb, its default and what it does."""
    from trisect.support.files import atomic_write_text

    known = commands.verbs()
    if verb not in known:
        raise unknown_name("verb", verb, known)
    if out.exists():
        raise TrisectError(f"{out} exists and may hold your own settings; name another file with -o.")
    atomic_write_text(out, commented_options(verb, out))
    screen.say_saved(out)
    screen.say_next(f"edit it, then trisect {verb} --config {screen.quoted(out)}")


def commented_options(verb: str, out: Path) -> str:
    """The file's text: options with a default as they are, the others as comments to fill in."""
    from typer.main import get_command

    command = get_command(commands.build_app()).commands[verb]  # type: ignore[attr-defined]
    head = f"""# Options of `trisect {verb}`: {" ".join(command.help.split())}
# Run it with: trisect {verb} --config {out.name}
# What is typed on the command line wins over this file; lines left out have their default."""
    return "\n".join([head, *(_entry(key, entry) for key, entry in _config.by_key(command.params).items())]) + "\n"


def _entry(key: str, parameter: Any) -> str:
    import yaml

    needed = " Needed, here or on the command line." if parameter.required else ""
    kind = "true|false" if _config.is_flag(parameter) else parameter.metavar
    about = f"{parameter.help}{needed}" + (f" [{kind.strip('[]')}]" if kind else "")
    comment = textwrap.fill(" ".join(about.split()), WIDTH, initial_indent="# ", subsequent_indent="# ")
    default = parameter.default
    if default is None or parameter.required:
        line = f"# {key}: [...]" if _config.takes_many(parameter) else f"# {key}: ..."
    else:
        value = default if isinstance(default, bool | int | float) else str(default)
        line = yaml.safe_dump({key: value}, width=10**6).strip()
    return f"\n{comment}\n{line}"
