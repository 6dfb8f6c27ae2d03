"""Options from a file, for every verb: `--config run.yaml` has the options' own names as keys.

What is typed wins over the file, and the file over defaults; that order is typer's, whose `default_map` is
filled here. Values are turned into the text that would have been typed, so that both are checked alike.
"""

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from trisect.errors import TrisectError, unknown_name
from trisect.support.checks import read_settings, shown

CONFIG, CALIBRATION = "config", "calibration"
NOT_IN_FILES = (CONFIG, "help")


def read_options(context: typer.Context, path: Path | None) -> Path | None:
    """The callback of --config: gives the verb's options the file's values as defaults."""
    if path is not None and not context.resilient_parsing:
        context.default_map = {**(context.default_map or {}), **options_in(path, context)}
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        is_eager=True,
        callback=read_options,
        help="YAML with options as keys; those typed here win. `trisect init VERB` writes one.",
        rich_help_panel="For every verb",
    ),
]


def options_in(path: Path, context: typer.Context) -> dict[str, Any]:
    """The file's options by parameter name, as typer takes them."""
    parameters = by_key(context.command.params)
    data = _mapping(path)
    found: dict[str, Any] = {}
    for key, value in _flat(data, path, parameters):
        parameter = parameters.get(key)
        if parameter is None:
            raise _unknown(path, key, context)
        if found.setdefault(parameter.name, value) != value:
            raise TrisectError(f"{path} gives {key} twice, with different values; keep one.")
    named = {parameter.name: (key, parameter) for key, parameter in parameters.items()}
    return {name: as_typed(*named[name], value, path) for name, value in found.items()}


def by_key(parameters: Iterable[Any]) -> dict[str, Any]:
    """The parameters of a verb that a file can give, under their names there."""
    keyed = {key_of(parameter): parameter for parameter in parameters}
    return {key: parameter for key, parameter in keyed.items() if key not in NOT_IN_FILES}


def key_of(parameter: Any) -> str:
    """`kv_ratio` for --kv-ratio; an argument has the name that the verb's `run` gives it."""
    if parameter.param_type_name == "argument":
        return str(parameter.name)
    return max(parameter.opts, key=len).lstrip("-").replace("-", "_")


def takes_many(parameter: Any) -> bool:
    """Whether an option may be repeated, or an argument has several words."""
    return bool(getattr(parameter, "multiple", False)) or parameter.nargs == -1


def is_flag(parameter: Any) -> bool:
    """Whether an option is switched on by its name alone."""
    return bool(getattr(parameter, "is_flag", False))


def as_typed(key: str, parameter: Any, value: Any, path: Path) -> Any:
    """A value of the file as the command line would have it."""
    where = f"{path}: {key}"
    if value is None:
        raise TrisectError(f"{where} has no value; give it one, or leave the line out for the default.")
    if is_flag(parameter):
        if not isinstance(value, bool):
            raise TrisectError(f"{where} is true or false, not {shown(value)}.")
        return value
    if takes_many(parameter):
        entries = value if isinstance(value, list) else [value]
        return [_text(where, parameter, entry) for entry in entries]
    listed = any(mark in (parameter.metavar or "") for mark in ("LIST", ",..."))
    if listed and isinstance(value, list):
        return ",".join(_text(where, parameter, entry) for entry in value)
    if listed and isinstance(value, dict):
        return ",".join(f"{name}={_text(where, parameter, entry)}" for name, entry in value.items())
    return _text(where, parameter, value)


def without_replaced_goals(context: typer.Context, options: dict[str, Any]) -> dict[str, Any]:
    """A run has one goal, so that one which is typed replaces the file's."""
    from trisect.config.goals import GOALS

    sources = {name: _source(context, name) for name in GOALS if name in options}
    if "COMMANDLINE" not in sources.values():
        return options
    replaced = [name for name, source in sources.items() if source == "DEFAULT_MAP"]
    return {**options, **dict.fromkeys(replaced)}


def blame(error: Any) -> str:
    """Which file a value came from that typer refuses, and what it says there; else nothing."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or parameter is None or _source(context, parameter.name) != "DEFAULT_MAP":
        return ""
    value = context.default_map[parameter.name]
    return f"{context.params['config_file']} gives {shown(value)}. "


def _source(context: typer.Context, name: str) -> str:
    source = context.get_parameter_source(name)
    return "" if source is None else source.name


def _mapping(path: Path) -> dict[str, Any]:
    data = read_settings(path)
    if data is None:  # every line of a fresh `trisect init` may be a comment
        return {}
    if not isinstance(data, dict):
        raise TrisectError(f"{path} must hold options such as `ratio: 0.25`, not {shown(data)}.")
    return data


def _flat(data: Mapping[str, Any], path: Path, parameters: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Keys with underscores; `calibration` may hold its settings, as in trisect.CompressConfig."""
    pairs = [(key.replace("-", "_"), value) for key, value in data.items()]
    keys = [key for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise TrisectError(f"{path} has a key once with dashes and once with underscores; keep one.")
    nested = dict(pairs).get(CALIBRATION)
    if CALIBRATION not in parameters or not isinstance(nested, dict):
        return pairs
    inner = [(CALIBRATION if key == "source" else key.replace("-", "_"), value) for key, value in nested.items()]
    return [*(pair for pair in pairs if pair[0] != CALIBRATION), *inner]


def _unknown(path: Path, key: str, context: typer.Context) -> TrisectError:
    """A typo is answered with near names, another verb's option with the verb."""
    own = sorted(by_key(context.command.params))
    verbs = getattr(getattr(context.parent, "command", None), "commands", {})
    others = [name for name, command in verbs.items() if key in by_key(command.params)]
    if others:
        near = get_close_matches(key, own)
        guess = f" Did you mean {' or '.join(near)}?" if near else ""
        return TrisectError(
            f"{path}: {key} is an option of {', '.join(others)}, not of {context.info_name}; a file has the "
            f"options of one verb.{guess}"
        )
    return unknown_name(f"option in {path}:", key, own)


def _text(where: str, parameter: Any, value: Any) -> str:
    """One value as the word that would have been typed; the shell's `~/` included."""
    words = (parameter.metavar or "").split("|")
    if isinstance(value, bool):
        word = "on" if value else "off"  # YAML reads these two as true and false
        if word not in words:
            raise TrisectError(f"{where} takes no {str(value).lower()}; put it in quotes if it is a name.")
        return word
    if isinstance(value, list | dict) or value is None:
        kind = "nothing" if value is None else "a list" if isinstance(value, list) else "a mapping"
        raise TrisectError(f"{where} takes one value, not {kind}.")
    text = str(value)
    return os.path.expanduser(text) if text.startswith("~/") else text
