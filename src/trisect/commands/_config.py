"""Options from a file, for every verb: `--config run.yaml` has the options' own names as keys.

What is typed wins over the file, and the file over defaults; that order is typer's, whose `default_map` is
filled here. Values are turned into the text that would have been typed, so that both are checked alike.
"""

import os
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from trisect.config.goals import GOALS
from trisect.errors import TrisectError, unknown_name
from trisect.support.checks import read_settings, shown

CALIBRATION = "calibration"


def read_options(context: typer.Context, path: Path | None) -> Path | None:
    """The callback of --config: gives the verb's options the file's values as defaults."""
    if path is None or context.resilient_parsing:
        return path
    parameters = by_key(context.command.params)
    found: dict[str, Any] = {}
    for key, value in _entries(path, nested=CALIBRATION in parameters):
        if key not in parameters:
            raise _unknown(path, key, context)
        if found.setdefault(key, value) != value:
            raise TrisectError(f"{path} gives {key} twice, with different values; keep one.")
    typed = {parameters[key].name: _as_typed(f"{path}: {key}", parameters[key], found[key]) for key in found}
    context.default_map = {**(context.default_map or {}), **typed}
    return path


def by_key(parameters: Iterable[Any]) -> dict[str, Any]:
    """The parameters that a file can give: `kv_ratio` for --kv-ratio, arguments by the name in the verb's `run`."""
    keyed = {max(entry.opts, key=len).lstrip("-").replace("-", "_"): entry for entry in parameters}
    return {key: entry for key, entry in keyed.items() if key not in ("config", "help")}


def takes_many(parameter: Any) -> bool:
    """Whether an option may be repeated, or an argument has several words."""
    return bool(getattr(parameter, "multiple", False)) or parameter.nargs == -1


def is_flag(parameter: Any) -> bool:
    """Whether an option is switched on by its name alone."""
    return bool(getattr(parameter, "is_flag", False))


def without_replaced_goals(context: typer.Context, options: dict[str, Any]) -> dict[str, Any]:
    """A run has one goal, so that one which is typed replaces the file's."""
    sources = {name: _source(context, name) for name in GOALS if name in options}
    if "COMMANDLINE" not in sources.values():
        return options
    return {**options, **{name: None for name, source in sources.items() if source == "DEFAULT_MAP"}}


def blame(error: Any) -> str:
    """Which file a value came from that typer refuses, and what it says there; else nothing."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or parameter is None or _source(context, parameter.name) != "DEFAULT_MAP":
        return ""
    return f"{context.params['config_file']} gives {shown(context.default_map[parameter.name])}. "


def _source(context: typer.Context, name: str) -> str:
    source = context.get_parameter_source(name)
    return "" if source is None else source.name


def _entries(path: Path, *, nested: bool) -> Iterator[tuple[str, Any]]:
    """Keys with underscores; `calibration` may hold its settings, as in trisect.CompressConfig."""
    data = read_settings(path)
    data = {} if data is None else data  # every line of a fresh `trisect init` may be a comment
    if not isinstance(data, dict):
        raise TrisectError(f"{path} must hold options such as `ratio: 0.25`, not {shown(data)}.")
    options = {key.replace("-", "_"): value for key, value in data.items()}
    if len(options) != len(data):
        raise TrisectError(f"{path} has a key once with dashes and once with underscores; keep one.")
    for key, value in options.items():
        if nested and key == CALIBRATION and isinstance(value, dict):
            for inner, setting in value.items():
                yield CALIBRATION if inner == "source" else inner.replace("-", "_"), setting
        else:
            yield key, value


def _unknown(path: Path, key: str, context: typer.Context) -> TrisectError:
    """A typo is answered with near names, another verb's option with the verb."""
    own = sorted(by_key(context.command.params))
    verbs = getattr(getattr(context.parent, "command", None), "commands", {})
    others = [name for name, command in verbs.items() if key in by_key(command.params)]
    if not others:
        return unknown_name(f"option in {path}:", key, own)
    near = get_close_matches(key, own)
    guess = f" Did you mean {' or '.join(near)}?" if near else ""
    return TrisectError(
        f"{path}: {key} is an option of {', '.join(others)}, not of {context.info_name}; a file has the "
        f"options of one verb.{guess}"
    )


def _as_typed(where: str, parameter: Any, value: Any) -> Any:
    """A value of the file as the command line would have it."""
    if value is None:
        raise TrisectError(f"{where} has no value; give it one, or leave the line out for the default.")
    if is_flag(parameter):
        if not isinstance(value, bool):
            raise TrisectError(f"{where} is true or false, not {shown(value)}.")
        return value
    if takes_many(parameter):
        return [_word(where, parameter, entry) for entry in (value if isinstance(value, list) else [value])]
    listed = any(mark in (parameter.metavar or "") for mark in ("LIST", ",..."))
    if listed and isinstance(value, list):
        return ",".join(_word(where, parameter, entry) for entry in value)
    if listed and isinstance(value, dict):
        return ",".join(f"{name}={_word(where, parameter, entry)}" for name, entry in value.items())
    return _word(where, parameter, value)


def _word(where: str, parameter: Any, value: Any) -> str:
    """One value as the word that would have been typed; the shell's `~/` included."""
    if isinstance(value, bool):
        word = "on" if value else "off"  # YAML reads these two as true and false
        if word not in (parameter.metavar or "").split("|"):
            raise TrisectError(f"{where} takes no {str(value).lower()}; put it in quotes if it is a name.")
        return word
    if value is None or isinstance(value, list | dict):
        kind = "nothing" if value is None else "a list" if isinstance(value, list) else "a mapping"
        raise TrisectError(f"{where} takes one value, not {kind}.")
    text = str(value)
    return os.path.expanduser(text) if text.startswith("~/") else text
